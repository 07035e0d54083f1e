"""All weight layouts found in `.nemo` files, read lazily into canonical form."""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

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
    split,
    split_axis,
    unpad_vocabulary,
)
from aligner.checkpoint.nemo.archive import ArchiveReader
from aligner.checkpoint.nemo.tensor_file import StoredTensor, load_tensors
from aligner.checkpoint.nemo.torch_dist import TorchDistSource
from aligner.checkpoint.nemo.zarr_v2 import ZarrSource
from aligner.checkpoint.resplit import origin_of_rows, runs_of_rows
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


class Reader(Protocol):
    """Reader of one whole tensor."""

    def __call__(self) -> Tensor:
        """The tensor, its bytes checked."""
        ...

    def begin(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        """Check the bytes of a tensor-parallel rank's share in threads, before they are read."""
        ...


@dataclass(frozen=True)
class JoinedParts:
    """Reader of a tensor that tensor parallelism split: ``parts`` in the order of their ranks.

    Shapes of the parts: see `merge`.
    """

    name: str
    parts: list[StoredTensor]
    architecture: GPTArchitecture

    def __call__(self) -> Tensor:
        """The whole tensor."""
        return merge(self.name, [part.read() for part in self.parts], self.architecture)

    def begin(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        """See `Reader`."""
        count = len(self.parts)
        for part in self.parts[tp_rank * count // tp_size : -(-(tp_rank + 1) * count // tp_size)]:
            part.begin()

    @property
    def whole_shape(self) -> torch.Size:
        """Its shape, for which nothing is read."""
        parts = [torch.empty_like(part.view, device="meta") for part in self.parts]
        return merge(self.name, parts, self.architecture).shape

    def share(self, tp_rank: int, tp_size: int) -> Tensor:
        """`split` of the whole tensor, for which only the parts that it needs are read.

        Returns a view of one part where the rows were together.
        """
        axis, shape = split_axis(self.name), self.parts[0].view.shape
        are_equal = all(part.view.shape == shape for part in self.parts)
        if axis is None or not are_equal or len(shape) <= axis:
            return split(self.name, self(), self.architecture, tp_rank, tp_size)
        origin = origin_of_rows(
            self.name, shape, len(self.parts), self.architecture, tp_rank=tp_rank, tp_size=tp_size
        )
        runs = list(runs_of_rows(origin, shape[axis]))
        if len(runs) == 1 and runs[0][3] == len(origin):
            _, index, start, length = runs[0]
            return self.parts[index].read().narrow(axis, start, length)
        wanted = [len(origin) if dim == axis else size for dim, size in enumerate(shape)]
        result = self.parts[0].view.new_zeros(wanted)
        for first, index, start, length in runs:
            rows = self.parts[index].read().narrow(axis, start, length)
            result.narrow(axis, first, length).copy_(rows)
        return result


@dataclass(frozen=True)
class StackedTensor:
    """Reader of a tensor of a distributed checkpoint, or of one layer or expert of it."""

    source: "TensorSource"
    key: str
    index: tuple[int, ...] = ()

    def __call__(self) -> Tensor:
        """The tensor."""
        return self.source.read(self.key, self.index)

    def begin(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        """See `Reader`."""
        self.source.begin(self.key, self.index)


class LazyWeights(LazyTensors):
    """Canonical weights that are read when indexed; names and shapes are checked.

    While the caller copies a tensor, a thread checks the bytes of the next one in the order of
    ``readers``, which maps each canonical name to what reads its tensor.
    """

    def __init__(
        self,
        readers: Mapping[str, Reader],
        architecture: GPTArchitecture,
        source: str,
    ) -> None:
        check_names(readers, architecture, source)
        self._architecture = architecture
        self._shapes = expected_shapes(architecture)
        # A copy of the tied embedding on the last pipeline stage is not a weight of its own.
        tied = architecture.tie_embeddings
        self._readers = {n: read for n, read in readers.items() if not (tied and n == OUTPUT_LAYER)}
        self._next = dict(itertools.pairwise(self._readers))
        super().__init__(self._readers)

    def __getitem__(self, name: str) -> Tensor:
        tensor = unpad_vocabulary(name, self._readers[name](), self._architecture)
        if name in self._next:
            self._readers[self._next[name]].begin()
        if name not in REWARD_HEAD:
            check_shape(name, tensor.shape, self._shapes[name])
        return tensor

    def share(self, name: str, tp_rank: int, tp_size: int) -> Tensor:
        """This rank's part of a tensor (`split`), of which no more is read where it is mapped."""
        reader = self._readers[name]
        if not isinstance(reader, JoinedParts):
            return split(name, self[name], self._architecture, tp_rank, tp_size)
        check_shape(name, reader.whole_shape, self._shapes[name])
        share = reader.share(tp_rank, tp_size)
        if name in self._next:
            self._readers[self._next[name]].begin(tp_rank, tp_size)
        return share


class TensorSource(Protocol):
    """A distributed checkpoint: global tensors, readable in part."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Tensor ``key`` with its leading axes fixed at ``index``."""
        ...

    def begin(self, key: str, index: tuple[int, ...] = ()) -> None:
        """Check what `read` is going to read in threads, if it is checked at all."""
        ...


def read_weights(archive: ArchiveReader, architecture: GPTArchitecture) -> LazyWeights:
    """Find out how the archive lays out its weights and open them."""
    names = archive.names
    if f"{WEIGHTS_FOLDER}/metadata.json" in names:
        readers = _stacked_readers(_distributed_source(archive), architecture)
    elif WEIGHTS_FILE in names:
        readers = _rank_readers([[_load_rank(archive, WEIGHTS_FILE)]], architecture)
    elif any(map(_RANK_FILE.match, names)):
        readers = _rank_readers(_load_ranks(archive), architecture)
    else:
        raise CheckpointError(
            f"{str(archive.path)!r} holds no weights: expected {WEIGHTS_FILE}, "
            f"{WEIGHTS_FOLDER}/metadata.json, mp_rank_XX/ or tp_rank_XX_pp_rank_XXX/"
        )
    return LazyWeights(readers, architecture, repr(str(archive.path)))


def _distributed_source(archive: ArchiveReader) -> TensorSource:
    try:
        metadata = json.loads(archive.read(f"{WEIGHTS_FOLDER}/metadata.json"))
        backend = metadata["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{WEIGHTS_FOLDER}/metadata.json is damaged: {error!r}") from error
    sources: dict[str, Callable[[ArchiveReader, str], TensorSource]] = {
        "torch_dist": TorchDistSource,
        "zarr": ZarrSource,
    }
    if backend not in sources:
        raise CheckpointError(
            f"{WEIGHTS_FOLDER}/metadata.json names sharded_backend={backend!r}; "
            f"known: {', '.join(sources)}"
        )
    return sources[backend](archive, WEIGHTS_FOLDER)


def _stacked_readers(source: TensorSource, architecture: GPTArchitecture) -> dict[str, Reader]:
    """Undo the stacking: one reader for each layer (and expert) of each stacked tensor.

    Of more layers than the model has only the first surplus one is named, which is refused.
    """
    most_layers = architecture.num_layers + 1
    most_experts = (architecture.num_moe_experts or 0) + 1
    readers: dict[str, Reader] = {}

    for key, shape in source.shapes.items():
        name = canonical_name(key)
        if name is None:
            continue
        stacked = _STACKED.match(name)
        if stacked is None:
            readers[name] = StackedTensor(source, key)
            continue
        if len(shape) < 1 + (_STACKED_EXPERTS in f".{stacked[1]}"):
            raise CheckpointError(f"{key} is no stack of layers: its shape is {list(shape)}")
        for layer in range(min(shape[0], most_layers)):
            suffix = f"decoder.layers.{layer}.{stacked[1]}"
            if _STACKED_EXPERTS not in suffix:
                readers[suffix] = StackedTensor(source, key, (layer,))
                continue
            for expert in range(min(shape[1], most_experts)):
                local = suffix.replace(_STACKED_EXPERTS, f".experts.local_experts.{expert}.")
                readers[local] = StackedTensor(source, key, (layer, expert))
    return readers


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


def _rank_readers(
    stages: list[list[RankState]], architecture: GPTArchitecture
) -> dict[str, Reader]:
    """One reader for each tensor, merging its tensor-parallel parts; layers renumbered globally."""
    readers: dict[str, Reader] = {}
    first_layer = 0
    for stage, ranks in enumerate(stages):
        layers = 0
        for name in ranks[0]:
            if any(name not in rank for rank in ranks):
                raise CheckpointError(f"{name} is missing on some tensor-parallel rank of {stage=}")
            match = _LAYER.match(name)
            layers = max(layers, int(match[1]) + 1 if match else 0)
            unique = f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}" if match else name
            parts = [rank[name] for rank in ranks]
            readers[unique] = JoinedParts(unique, parts, architecture)
        first_layer += layers
    return readers
