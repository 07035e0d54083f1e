"""All weight layouts found in `.nemo` files, read lazily into canonical form."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import (
    OUTPUT_LAYER,
    REWARD_HEAD,
    LazyTensors,
    canonical_name,
    check_names,
    check_shape,
    expected_shapes,
    merge,
    origin_of_rows,
    runs_of_rows,
    split,
    split_axis,
)
from aligner.checkpoint.nemo.archive import ArchiveReader
from aligner.checkpoint.nemo.tensor_file import StoredTensor, load_tensors
from aligner.checkpoint.nemo.torch_dist import TorchDistSource
from aligner.checkpoint.nemo.zarr_v2 import ZarrSource
from aligner.errors import CheckpointError

WEIGHTS_FOLDER = "model_weights"
WEIGHTS_FILE = "model_weights.ckpt"
_RANK_FILE = re.compile(
    r"^(?:mp_rank_(?P<mp>\d+)|tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+))/model_weights\.ckpt$"
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_STACKED = re.compile(r"^decoder\.layers\.(?!\d)(.*)$")
_STACKED_EXPERTS = ".experts.experts."
_LEGACY_UP = re.compile(r"(.*\.mlp\.)dense_h_to_4h_2\.(weight|bias)$")


@dataclass(frozen=True)
class StackedPart:
    """A tensor of a distributed checkpoint, or one layer or expert of it."""

    source: TorchDistSource | ZarrSource
    key: str
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the axes of layers and experts."""
        return self.source.shapes[self.key][len(self.index) :]

    def begin(self) -> None:
        """Check its bytes in threads, if they are checked at all, before they are read."""
        self.source.begin(self.key, self.index)

    def read(self) -> Tensor:
        """The tensor, its bytes checked."""
        return self.source.read(self.key, self.index)


Part = StoredTensor | StackedPart


class LazyWeights(LazyTensors):
    """Canonical weights that are read when indexed; names and shapes are checked.

    While the caller copies a tensor, a thread checks the bytes of the next one.

    Args:
        parts: canonical name → parts of the tensor in the order of the tensor-parallel ranks that
            wrote them, as `merge` joins them. The order of the names is that of the threads.
        architecture: shape of the model.
        source: name of the file, for errors.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[Part]], architecture: GPTArchitecture, source: str
    ) -> None:
        check_names(parts, architecture, source)
        self._architecture = architecture
        self._shapes = expected_shapes(architecture)
        # A copy of the tied embedding on the last pipeline stage is not a weight of its own.
        tied_copy = OUTPUT_LAYER if architecture.tie_embeddings else None
        self._parts = {name: each for name, each in parts.items() if name != tied_copy}
        self._next = dict(itertools.pairwise(self._parts))
        super().__init__(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._whole(name)
        self._begin_next(name)
        return tensor

    def share(self, name: str, tp_rank: int, tp_size: int) -> Tensor:
        """`split` of a tensor; of several parts only those that it needs are read.

        Returns a view of one part if the rows were together.
        """
        parts = self._parts[name]
        if isinstance(parts[0], StackedPart):
            return split(name, self[name], self._architecture, tp_rank, tp_size)
        axis, shape = split_axis(name), parts[0].shape
        if axis is None or len(shape) <= axis or any(part.shape != shape for part in parts):
            share = split(name, self._whole(name), self._architecture, tp_rank, tp_size)
        else:
            share = self._resplit(name, axis, parts[0].view, tp_rank, tp_size)
        self._begin_next(name, tp_rank, tp_size)
        return share

    def _whole(self, name: str) -> Tensor:
        self._check_shape(name)
        return merge(name, [part.read() for part in self._parts[name]], self._architecture)

    def _resplit(self, name: str, axis: int, like: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """Rows (or columns) of a share out of parts that are of the shape and dtype of ``like``."""
        self._check_shape(name)
        parts, shape = self._parts[name], like.shape
        ranks = {"tp_rank": tp_rank, "tp_size": tp_size}
        origin = origin_of_rows(name, shape, len(parts), self._architecture, **ranks)
        runs = list(runs_of_rows(origin, shape[axis]))
        rows = [parts[part].read().narrow(axis, start, length) for _, part, start, length in runs]
        if len(rows) == 1 and runs[0][3] == len(origin):
            return rows[0]
        wanted = [len(origin) if dim == axis else size for dim, size in enumerate(shape)]
        result = like.new_zeros(wanted)
        for (first, _, _, length), part in zip(runs, rows, strict=True):
            result.narrow(axis, first, length).copy_(part)
        return result

    def _check_shape(self, name: str) -> None:
        """Check the shape of the whole tensor, of which nothing is read."""
        if name not in REWARD_HEAD:  # for a head that does not fit, the role's error is clearer
            forms = [torch.empty(part.shape, device="meta") for part in self._parts[name]]
            whole = merge(name, forms, self._architecture)
            check_shape(name, whole.shape, self._shapes[name])

    def _begin_next(self, name: str, tp_rank: int = 0, tp_size: int = 1) -> None:
        """Check the bytes of the next tensor that a tensor-parallel rank is going to read."""
        if name in self._next:
            parts = self._parts[self._next[name]]
            first, end = (rank * len(parts) / tp_size for rank in (tp_rank, tp_rank + 1))
            for part in parts[math.floor(first) : math.ceil(end)]:
                part.begin()


def read_weights(archive: ArchiveReader, architecture: GPTArchitecture) -> LazyWeights:
    """Find out how the archive lays out its weights and open them."""
    names = archive.names
    if f"{WEIGHTS_FOLDER}/metadata.json" in names:
        parts = _stacked_parts(_distributed_source(archive), architecture)
    elif WEIGHTS_FILE in names:
        parts = _rank_parts([[_load_rank(archive, WEIGHTS_FILE)]])
    elif any(map(_RANK_FILE.match, names)):
        parts = _rank_parts(_load_ranks(archive))
    else:
        raise CheckpointError(
            f"{str(archive.path)!r} holds no weights: expected {WEIGHTS_FILE}, "
            f"{WEIGHTS_FOLDER}/metadata.json, mp_rank_XX/ or tp_rank_XX_pp_rank_XXX/"
        )
    return LazyWeights(parts, architecture, repr(str(archive.path)))


def _distributed_source(archive: ArchiveReader) -> TorchDistSource | ZarrSource:
    backend = archive.read_json(f"{WEIGHTS_FOLDER}/metadata.json").get("sharded_backend")
    sources: dict[str, type[TorchDistSource] | type[ZarrSource]] = {
        "torch_dist": TorchDistSource,
        "zarr": ZarrSource,
    }
    if not isinstance(backend, str) or backend not in sources:
        raise CheckpointError(
            f"{WEIGHTS_FOLDER}/metadata.json names sharded_backend={backend!r}; "
            f"known: {', '.join(sources)}"
        )
    return sources[backend](archive, WEIGHTS_FOLDER)


def _stacked_parts(
    source: TorchDistSource | ZarrSource, architecture: GPTArchitecture
) -> dict[str, Sequence[Part]]:
    """Undo the stacking: one part for each layer (and expert) of each stacked tensor.

    Of more layers than the model has only the first surplus one is named, which is refused.
    """
    most = (architecture.num_layers + 1, (architecture.num_moe_experts or 0) + 1)
    parts: dict[str, Sequence[Part]] = {}
    for key, shape in source.shapes.items():
        name = canonical_name(key)
        if name is None:
            continue
        stacked = _STACKED.match(name)
        has_experts = stacked is not None and _STACKED_EXPERTS in f".{stacked[1]}"
        axes = 0 if stacked is None else 1 + has_experts
        if len(shape) < axes:
            raise CheckpointError(f"{key} is no stack of layers: its shape is {list(shape)}")
        sizes = zip(shape[:axes], most, strict=False)
        for index in itertools.product(*(range(min(size, limit)) for size, limit in sizes)):
            unique = name if stacked is None else f"decoder.layers.{index[0]}.{stacked[1]}"
            if has_experts:
                local = f".experts.local_experts.{index[1]}."
                unique = unique.replace(_STACKED_EXPERTS, local)
            parts[unique] = [StackedPart(source, key, index)]
    return parts


RankState = dict[str, StoredTensor]


def _load_rank(archive: ArchiveReader, name: str) -> RankState:
    """Canonical names (layer numbers local to the stage) and tensors of one rank file."""
    state = load_tensors(archive.view(name), f"{name} of {str(archive.path)!r}")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{name} holds a {type(state).__name__}, not a state dict")
    result: RankState = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{name} of {str(archive.path)!r} has the key {key!r}, no name")
        canonical = canonical_name(key)
        if canonical is not None and isinstance(value, StoredTensor):
            result[canonical] = value
    _join_legacy_gates(result)
    return result


def _join_legacy_gates(state: RankState) -> None:
    """Old unfused SwiGLU keeps gate and up apart: stack them into ``[gate; up]``."""
    for name in list(state):
        match = _LEGACY_UP.match(name)
        if match is not None:
            gate = f"{match[1]}linear_fc1.{match[2]}"
            if gate not in state:
                raise CheckpointError(f"{name} stands without its gate {gate}")
            state[gate] = StoredTensor(torch.cat([state[gate].read(), state.pop(name).read()]))


def _load_ranks(archive: ArchiveReader) -> list[list[RankState]]:
    """Rank files as ``[pipeline stage][tensor rank]``."""
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
        raise CheckpointError(f"{str(archive.path)!r} lacks the files of ranks {', '.join(absent)}")
    return [[_load_rank(archive, files[pp, tp]) for tp in range(ranks)] for pp in range(stages)]


def _rank_parts(stages: list[list[RankState]]) -> dict[str, Sequence[Part]]:
    """Tensor-parallel parts of each tensor; layers renumbered globally."""
    parts: dict[str, Sequence[Part]] = {}
    first_layer = 0
    for stage, ranks in enumerate(stages):
        layers = 0
        for name in ranks[0]:
            if any(name not in rank for rank in ranks):
                raise CheckpointError(f"{name} is missing on some tensor-parallel rank of {stage=}")
            match = _LAYER.match(name)
            layers = max(layers, int(match[1]) + 1 if match else 0)
            unique = f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}" if match else name
            parts[unique] = [rank[name] for rank in ranks]
        first_layer += layers
    return parts
