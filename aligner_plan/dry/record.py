"""Record of a block of code on the dry device: memory, arithmetic, communication, host reads."""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import aligner
from aligner_plan.dry.known import Operation

_aten = torch.ops.aten
# In-place operations without a formula in torch's table, by the operation with the same cost.
_SAME_FLOPS = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
_LIBRARIES = (
    *(f"{Path(str(library.__file__)).parent}/" for library in (aligner, megatron.core)),
    f"{Path(__file__).parents[1]}/",
)
_DRY = f"{Path(__file__).parent}/"
# Lookups read as much of the first operand as they return. Scatters write as much of it as the
# other operands contain.
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
_SCATTERS = {_aten.index_put_, _aten.index_copy_, _aten.index_add_, _aten.scatter_}


class Kind(StrEnum):
    """Kinds of use of device memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, float32 weights and temporary memory of a step
    ACTIVATIONS = "activations"  # and all other memory
    KV_CACHE = "kv_cache"
    LOGITS = "logits"  # tiles of logits, and tensors that the output layer saves
    COMMUNICATION = "communication"  # results of collectives


# Kinds of allocations by the end of the file's path and the function (None: any function) that
# allocates. Weights and gradient buffers are named by their owners (`Memory.name`).
_ALLOCATING: dict[str, tuple[str | None, Kind]] = {
    "aligner/models/gpt/decode/kv_cache.py": ("__init__", Kind.KV_CACHE),
    "aligner/models/gpt/megatron/optimizer.py": (None, Kind.OPTIMIZER),
    "aligner/models/gpt/dtensor/optimizer.py": (None, Kind.OPTIMIZER),
    "aligner/models/gpt/role/training_state.py": (None, Kind.OPTIMIZER),
    # FSDP2: weights gathered for a pass, and gradients before and after they are scattered.
    "_fully_shard/_fsdp_param.py": ("init_all_gather_outputs", Kind.WEIGHTS),
    "_fully_shard/_fsdp_collectives.py": ("foreach_reduce", Kind.GRADIENTS),
    "aligner/models/gpt/decode/sampling.py": (None, Kind.LOGITS),
    "aligner/models/gpt/forward/token_logprobs.py": (None, Kind.LOGITS),
    "aligner/models/gpt/decode/model.py": ("logits", Kind.LOGITS),
    "aligner/logprobs/fused.py": (None, Kind.LOGITS),
    "aligner/distributed/model_utils/vocab_entropy.py": (None, Kind.LOGITS),
    "aligner/distributed/model_utils/vocab_topk.py": (None, Kind.LOGITS),
}


class Kernel(NamedTuple):
    """Kernels with the same dtype, arithmetic and memory traffic."""

    dtype: torch.dtype
    flops: int
    moved_bytes: int  # operands and results
    is_attention: bool = False


def _grouped_flops(rows: Tensor, matrices: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count a grouped product, in which each row or column meets the matrix of one group."""
    return 2 * rows.shape[0] * rows.shape[1] * matrices.shape[-1]


# Formulas that torch's table lacks.
_FORMULAS = {_aten._grouped_mm: _grouped_flops}


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind among the same processes."""

    name: str  # c10d's: allreduce_, _allgather_base_, send, …
    ranks: tuple[int, ...]
    overlaps: bool = False  # with kernels: asynchronous, or on another stream

    @property
    def group_size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    def wire_bytes(self, size: int) -> float:
        """Return the bytes that each process sends for operands of ``size`` bytes, in a ring.

        Received bytes do not count again.
        """
        share = (self.group_size - 1) / max(1, self.group_size)
        if self.name.startswith("recv"):
            return 0.0
        if self.name.startswith(("send", "broadcast")):
            return float(size) if share else 0.0
        return size * share * (2 if self.name.startswith("allreduce") else 1)


class Snapshot(NamedTuple):
    """Bytes alive at one moment, by kind."""

    total: int
    kinds: dict[Kind, int]


@dataclass(eq=False)  # two empty records are different
class Record:
    """Counts of one block, and its peak memory.

    ``collectives``: calls and bytes of the larger operand: the operand that is reduced or
    broadcast, the complete result or operand of a gather or scatter.
    """

    kernels: Counter[Kernel] = field(default_factory=Counter)
    # Waits of the host for the device, by the function of the library or of megatron-core.
    host_waits: Counter[str] = field(default_factory=Counter)
    graphed: int = 0  # kernels of CUDA graphs beyond the one launch of each graph
    copied_bytes: int = 0  # between host and device
    collectives: dict[Collective, tuple[int, int]] = field(default_factory=dict)
    # Most bytes alive on the device, including earlier ones, by the function of the library or of
    # megatron-core that allocated last. "" is the beginning.
    peaks: dict[str, Snapshot] = field(default_factory=dict)

    @property
    def host_reads(self) -> int:
        """Number of waits of the host for the device, mostly for a value."""
        return self.host_waits.total()

    @property
    def launches(self) -> int:
        """Number of launched kernels, without views and allocations. A CUDA graph is one launch."""
        return sum(self.kernels.values()) - self.graphed

    @property
    def flops(self) -> Counter[torch.dtype]:
        """Floating-point operations of matrix products and attention, by the operands' dtype."""
        flops: Counter[torch.dtype] = Counter()
        for kernel, count in self.kernels.items():
            if kernel.flops:
                flops[kernel.dtype] += kernel.flops * count
        return flops

    @property
    def peak_at(self) -> str:
        """Function at the highest peak. "" is the beginning."""
        return max(self.peaks, key=lambda location: self.peaks[location].total, default="")

    @property
    def peak(self) -> Snapshot:
        """Memory at the highest peak."""
        return self.peaks.get(self.peak_at, Snapshot(0, {}))

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive on the device, including bytes from before the block."""
        return self.peak.total

    def saw_kernel(self, kernel: Kernel, copied_bytes: int = 0) -> None:
        """Count one kernel that copies ``copied_bytes`` between host and device."""
        self.kernels[kernel] += 1
        self.copied_bytes += copied_bytes

    def saw_collective(
        self, name: str, ranks: Iterable[int], size: int, overlaps: bool = False
    ) -> None:
        """Count one collective of ``size`` bytes. ``overlaps``: it runs parallel to kernels."""
        key = Collective(name, tuple(ranks), overlaps)
        calls, total = self.collectives.get(key, (0, 0))
        self.collectives[key] = (calls + 1, total + size)

    def saw_memory(self, memory: "Memory", location: str) -> None:
        """Update the peak at ``location``, the code that has just allocated."""
        peak = self.peaks.get(location)
        if peak is None or memory.alive_bytes > peak.total:
            self.peaks[location] = memory.snapshot()


class Memory:
    """Bytes of the device that are alive, by storage and kind."""

    def __init__(self, device_type: str, block: int) -> None:
        """Count tensors of ``device_type`` in blocks of ``block`` bytes."""
        self.device_type = device_type
        self._block = block
        self.alive_bytes = 0
        self.kinds: Counter[Kind] = Counter()
        self._blocks: weakref.WeakKeyDictionary[Any, _Block] = weakref.WeakKeyDictionary()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor (any shape) is on this device."""
        return tensor.device.type == self.device_type

    def snapshot(self) -> Snapshot:
        """Return the memory in use now."""
        return Snapshot(self.alive_bytes, {kind: n for kind, n in self.kinds.items() if n})

    def saw(self, tensor: Tensor) -> bool:
        """Count the tensor's storage (any shape) once. Return True if it is new."""
        storage = tensor.untyped_storage()
        if storage in self._blocks:
            return False
        block = _Block(allocated_kind())
        self._blocks[storage] = block
        self._set(block, storage.nbytes())
        weakref.finalize(storage, self._set, block, 0)
        return True

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a known storage."""
        if storage in self._blocks:
            self._set(self._blocks[storage], storage.nbytes())

    def name(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Set the kind of the storages of ``tensors`` (any shape) that are on the device."""
        for tensor in tensors:
            if self.holds(tensor):
                self.saw(tensor)
                block = self._blocks[tensor.untyped_storage()]
                self.kinds[block.kind] -= block.size
                self.kinds[kind] += block.size
                block.kind = kind

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """Turn activations (any shape) that a collective wrote into communication memory."""
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage())
            if block is not None and block.kind is Kind.ACTIVATIONS:
                self.name(Kind.COMMUNICATION, [tensor])

    @contextlib.contextmanager
    def temporary(self, kind: Kind, size: int) -> Iterator[None]:
        """Count ``size`` bytes without a tensor for the duration of the block."""
        block = _Block(kind)
        self._set(block, size)
        yield
        self._set(block, 0)

    def _set(self, block: "_Block", size: int) -> None:
        size = -(-size // self._block) * self._block
        self.alive_bytes += size - block.size
        self.kinds[block.kind] += size - block.size
        block.size = size


@dataclass
class _Block:
    """One storage."""

    kind: Kind
    size: int = 0


def allocated_kind() -> Kind:
    """Return the kind of an allocation by the code that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        allocating = _allocating(frame.f_code.co_filename)
        if allocating is not None and allocating[0] in (None, frame.f_code.co_name):
            return allocating[1]
        frame = frame.f_back
    return Kind.ACTIVATIONS


def running_function() -> str:
    """Return file and name of the innermost running function of the library or megatron-core."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        stem = _stem_of_file(frame.f_code.co_filename)
        if stem:
            direction = " (backward)" if torch._C._current_graph_task_id() != -1 else ""
            return f"{stem}.{frame.f_code.co_name}{direction}"
        frame = frame.f_back
    return "backward"


@cache
def _allocating(path: str) -> tuple[str | None, Kind] | None:
    return next((entry for end, entry in _ALLOCATING.items() if path.endswith(end)), None)


@cache
def _stem_of_file(path: str) -> str:
    """Return the file name without suffix, empty for the dry device and for other libraries."""
    return Path(path).stem if path.startswith(_LIBRARIES) and not path.startswith(_DRY) else ""


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the values, or of the storage if an expanded tensor repeats them."""
    return min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes())


def counted(operation: Operation) -> Callable[[Record], None]:
    """Return a function that counts an operation in a record, if it is a kernel."""
    func, args, kwargs, out, operands, results = operation
    if not is_kernel(func):
        return lambda record: None
    # Arithmetic.
    packet = _SAME_FLOPS.get(func.overloadpacket, func.overloadpacket)
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    is_attention = flops > 0 and "attention" in packet.__name__
    # Memory traffic.
    if func.overloadpacket in _LOOKUPS:
        moved_bytes = 2 * sum(map(_bytes, results))
    elif func.overloadpacket in _SCATTERS:
        moved_bytes = 2 * sum(map(_bytes, operands[1:]))
    else:
        moved_bytes = sum(map(_bytes, (*operands, *results)))
    kernel = kernel_of(operands, results, flops, moved_bytes, is_attention)
    copied = 0
    if len({tensor.device.type for tensor in (*operands, *results) if tensor.dim()}) > 1:
        copied = max(map(_bytes, (*operands, *results)))
    return lambda record: record.saw_kernel(kernel, copied)


def kernel_of(
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    flops: int = 0,
    moved_bytes: int | None = None,
    is_attention: bool = False,
) -> Kernel:
    """Return a kernel, which by default reads its operands and writes its results once.

    Tensors may have any shape and dtype.
    """
    first = operands[0] if operands else results[0]
    if moved_bytes is None:
        moved_bytes = sum(map(_bytes, (*operands, *results)))
    return Kernel(first.dtype, flops, moved_bytes, is_attention)


@cache
def is_kernel(func: Any) -> bool:
    """Return whether an operation is a kernel, not a view or an allocation."""
    if func.namespace == "prim" or func.overloadpacket in _ALLOCATIONS:
        return False
    aliases = (output.alias_info for output in func._schema.returns)
    return not any(alias is not None and not alias.is_write for alias in aliases)


_ALLOCATIONS = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.detach,
    _aten.lift_fresh,
    _aten._unsafe_view,
    _aten.set_,
}
