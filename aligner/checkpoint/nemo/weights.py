"""Canonical weights of `.nemo` files in all layouts. A weight is read when it is indexed."""

import itertools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint import canonical
from aligner.checkpoint.nemo.archive import ArchiveReader
from aligner.checkpoint.nemo.tensor_file import Record, StoredTensor, load_tensors
from aligner.checkpoint.nemo.torch_dist import TorchDistSource
from aligner.checkpoint.nemo.zarr_v2 import ZarrSource
from aligner.errors import CheckpointError

WEIGHTS_FOLDER = "model_weights"
WEIGHTS_FILE = "model_weights.ckpt"
_RANK_FILE = re.compile(
    r"^(?:mp_rank_(?P<mp>\d+)|tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+))/model_weights\.ckpt$"
)
_STACKED = re.compile(r"^decoder\.layers\.(?!\d)(.*)$")
_STACKED_EXPERTS = ".experts.experts."
_THREADS = 1  # more threads would compete with the copying thread
_TENSORS_AHEAD = 8  # about a layer
# Value of ``sharded_backend`` → reader.
_SOURCES: dict[str, type[TorchDistSource | ZarrSource]] = {
    "torch_dist": TorchDistSource,
    "zarr": ZarrSource,
}
_LEGACY_UP = re.compile(r"(.*\.mlp\.)dense_h_to_4h_2\.(weight|bias)$")


@dataclass(frozen=True)
class StackedPart:
    """``tensor[index]`` of the tensor ``key``. ``index``: layer and expert in a stacked tensor."""

    source: TorchDistSource | ZarrSource
    key: str
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``tensor[index]``, without the axes of layers and experts."""
        return self.source.shapes[self.key][len(self.index) :]

    def records(self) -> list[Record]:
        """Return the records that a caller must `Record.check` before it uses the values."""
        return self.source.records(self.key, self.index)

    def tensor(self) -> Tensor:
        """Return ``tensor[index]``, whose checksum has not been checked yet."""
        return self.source.read(self.key, self.index)


Part = StoredTensor | StackedPart


class LazyWeights(canonical.LazyTensors):
    """Canonical weights that are read when indexed. Names, shapes and checksums are checked.

    Args:
        parts: canonical name → parts of the tensor in the order of the tensor-parallel ranks.
            Reading is fastest if names are indexed in the order of this mapping.
        architecture: architecture of the model.
        source: name of the file, for errors.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[Part]], architecture: GPTArchitecture, source: str
    ) -> None:
        canonical.check_names(parts, architecture, source)
        self._architecture = architecture
        self._shapes = canonical.expected_shapes(architecture)
        # The last pipeline stage's copy of a tied embedding is not a separate weight.
        tied_copy = canonical.OUTPUT_LAYER if architecture.tie_embeddings else None
        self._parts = {name: parts[name] for name in parts if name != tied_copy}
        self._order = list(self._parts)
        self._positions = {name: position for position, name in enumerate(self._order)}
        self._threads = ThreadPoolExecutor(_THREADS, "aligner-crc32")
        self._unchecked: list[Record] = []
        super().__init__(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        # A thread compares the records of the next tensors while the caller copies this tensor.
        start = self._positions[name]
        for upcoming in self._order[start : start + _TENSORS_AHEAD]:
            for part in self._parts[upcoming]:
                self._begin(part)
        tensor = self._joined(name)
        self.check()
        return tensor

    def share(self, name: str, tp_rank: int, tp_size: int) -> Tensor:
        """Return this rank's part of a tensor (see `split`). Call `check` before using the part."""
        parts, axis = self._parts[name], canonical.split_axis(name)
        first, shapes = parts[0], {tuple(part.shape) for part in parts}
        is_split = axis is not None and axis < len(first.shape) and len(shapes) == 1
        if isinstance(first, StoredTensor) and axis is not None and is_split:
            return self._resplit(name, axis, first.view, tp_rank, tp_size)
        return canonical.split(name, self._joined(name), self._architecture, tp_rank, tp_size)

    def check(self) -> None:
        """Raise `CheckpointError` if a part that was read since the last check is damaged."""
        for record in self._unchecked:
            record.check()
        self._unchecked.clear()

    def _begin(self, part: Part) -> list[Record]:
        records = part.records()
        for record in records:
            record.begin(self._threads)
        return records

    def _read(self, part: Part) -> Tensor:
        self._unchecked += self._begin(part)
        return part.tensor()

    def _joined(self, name: str) -> Tensor:
        self._check_shape(name)
        return canonical.merge(
            name, [self._read(part) for part in self._parts[name]], self._architecture
        )

    def _resplit(self, name: str, axis: int, like: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """Copy this rank's rows (or columns) from the file's parts, which have ``like``'s shape."""
        self._check_shape(name)
        parts, shape = self._parts[name], like.shape
        ranks = {"tp_rank": tp_rank, "tp_size": tp_size}
        origin = canonical.origin_of_rows(name, shape, len(parts), self._architecture, **ranks)
        runs = list(canonical.runs_of_rows(origin, shape[axis]))
        # Read only the parts that contain rows of this rank's part.
        rows = [
            self._read(parts[part]).narrow(axis, start, length) for _, part, start, length in runs
        ]
        if len(rows) == 1 and runs[0][3] == len(origin):
            return rows[0]
        # Several runs are copied into one tensor. Padding rows are zero.
        sizes = [len(origin) if dim == axis else size for dim, size in enumerate(shape)]
        result = like.new_zeros(sizes)
        for (first, _, _, length), part in zip(runs, rows, strict=True):
            result.narrow(axis, first, length).copy_(part)
        return result

    def _check_shape(self, name: str) -> None:
        # The role checks the shape of a head with a clearer error.
        if name not in canonical.REWARD_HEAD:
            forms = [torch.empty(part.shape, device="meta") for part in self._parts[name]]
            merged = canonical.merge(name, forms, self._architecture)
            canonical.check_shape(name, merged.shape, self._shapes[name])


def read_weights(archive: ArchiveReader, architecture: GPTArchitecture) -> LazyWeights:
    """Open the weights of an archive, in any format that NeMo has written."""
    names = archive.names
    if f"{WEIGHTS_FOLDER}/metadata.json" in names:
        backend = archive.read_json(f"{WEIGHTS_FOLDER}/metadata.json").get("sharded_backend")
        if backend not in _SOURCES:
            raise CheckpointError(
                f"{WEIGHTS_FOLDER}/metadata.json names sharded_backend={backend!r}. "
                f"Supported: {', '.join(_SOURCES)}"
            )
        parts = _stacked_parts(_SOURCES[backend](archive, WEIGHTS_FOLDER), architecture)
    elif WEIGHTS_FILE in names:
        parts = _rank_parts([[_load_rank(archive, WEIGHTS_FILE)]])
    elif any(map(_RANK_FILE.match, names)):
        parts = _rank_parts(_load_ranks(archive))
    else:
        raise CheckpointError(
            f"{str(archive.path)!r} contains no weights in a supported format: {WEIGHTS_FILE}, "
            f"{WEIGHTS_FOLDER}/metadata.json, mp_rank_XX/ or tp_rank_XX_pp_rank_XXX/"
        )
    return LazyWeights(parts, architecture, repr(str(archive.path)))


def _stacked_parts(
    source: TorchDistSource | ZarrSource, architecture: GPTArchitecture
) -> dict[str, Sequence[Part]]:
    """Return canonical name → a list of one part, for every layer (and expert) of a stack."""
    # List one layer more than the model has, which `check_names` then reports.
    max_counts = (architecture.num_layers + 1, (architecture.num_moe_experts or 0) + 1)
    parts: dict[str, Sequence[Part]] = {}
    for key, shape in source.shapes.items():
        name = canonical.canonical_name(key)
        if name is None:
            continue
        # The first axes are layers, unless the name has the layer's number, and experts.
        stacked = _STACKED.match(name)
        has_experts = _STACKED_EXPERTS in name
        limits = max_counts[stacked is None : 1 + has_experts]
        if len(shape) < len(limits):
            raise CheckpointError(f"{key} has shape {list(shape)}, expected a stack of layers")
        sizes = zip(shape, limits, strict=False)
        for index in itertools.product(*(range(min(size, limit)) for size, limit in sizes)):
            unique = name if stacked is None else f"decoder.layers.{index[0]}.{stacked[1]}"
            if has_experts:
                local = f".experts.local_experts.{index[-1]}."
                unique = unique.replace(_STACKED_EXPERTS, local)
            parts[unique] = [StackedPart(source, key, index)]
    return parts


RankState = dict[str, StoredTensor]


def _load_rank(archive: ArchiveReader, name: str) -> RankState:
    """Return name → tensor of one rank's file. Layers are numbered within the pipeline stage."""
    state = load_tensors(archive.view(name), f"{name} of {str(archive.path)!r}")
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise CheckpointError(f"{name} contains a {kind} instead of a state dict. Copy it again")
    result: RankState = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{name} of {str(archive.path)!r} has the non-text key {key!r}")
        canonical_key = canonical.canonical_name(key)
        if canonical_key is not None and isinstance(value, StoredTensor):
            result[canonical_key] = value
    # Old files have separate gate and up projections. Stack them to ``[gate; up]``.
    for up in list(result):
        match = _LEGACY_UP.match(up)
        if match is not None:
            gate = f"{match[1]}linear_fc1.{match[2]}"
            if gate not in result:
                raise CheckpointError(
                    f"{name} of {str(archive.path)!r} contains {up} without {gate}. Copy it again"
                )
            halves = result[gate], result.pop(up)
            for record in halves[0].records() + halves[1].records():
                record.check()
            result[gate] = StoredTensor(torch.cat([half.tensor() for half in halves]))
    return result


def _load_ranks(archive: ArchiveReader) -> list[list[RankState]]:
    """Load the files of all ranks. The result is indexed ``[pipeline stage][tensor rank]``."""
    files: dict[tuple[int, int], str] = {}
    for name in archive.names:
        match = _RANK_FILE.match(name)
        if match is not None:
            files[int(match["pp"] or 0), int(match["tp"] or match["mp"] or 0)] = name
    stages, ranks = (max(key[axis] for key in files) + 1 for axis in (0, 1))
    absent = [
        f"tp {tp} pp {pp}" for pp in range(stages) for tp in range(ranks) if (pp, tp) not in files
    ]
    if absent:
        ranks_text = ", ".join(absent)
        raise CheckpointError(f"{str(archive.path)!r} lacks the files of ranks {ranks_text}")
    return [[_load_rank(archive, files[pp, tp]) for tp in range(ranks)] for pp in range(stages)]


def _rank_parts(stages: list[list[RankState]]) -> dict[str, Sequence[Part]]:
    """Return canonical name → tensor-parallel parts. ``stages``: result of `_load_ranks`."""
    parts: dict[str, Sequence[Part]] = {}
    first_layer = 0
    for stage, ranks in enumerate(stages):
        layers = 0
        for name in ranks[0]:
            if any(name not in rank for rank in ranks):
                raise CheckpointError(
                    f"{name} is missing in the file of a tensor-parallel rank of pipeline stage "
                    f"{stage}, but not in the file of rank 0. Copy the checkpoint again"
                )
            match = canonical.LAYER.match(name)
            layers = max(layers, int(match[1]) + 1 if match else 0)
            unique = f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}" if match else name
            parts[unique] = [rank[name] for rank in ranks]
        first_layer += layers
    return parts
