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
# In-place forms that torch's table of formulas leaves out, by the one that costs the same.
_SAME_FLOPS = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
_LIBRARIES = tuple(f"{Path(str(each.__file__)).parent}/" for each in (aligner, megatron.core))
_DRY = f"{Path(__file__).parent}/"
# Of the first operand they touch as much as they return, or as the others hold.
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
_SCATTERS = {_aten.index_put_, _aten.index_copy_, _aten.index_add_, _aten.scatter_}


class Kind(StrEnum):
    """Kinds of use of device memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, float32 weights and what a step needs besides
    ACTIVATIONS = "activations"  # and whatever is none of the others
    KV_CACHE = "kv_cache"
    LOGITS = "logits"  # tiles of logits, and what the output layer keeps beside them
    COMMUNICATION = "communication"  # what collectives write into


# Code whose allocations are of a kind, by the end of the file's path and, where one is named, the
# function. Weights and gradient buffers are named by who holds them (`Memory.name`).
_ALLOCATING: dict[str, tuple[str | None, Kind]] = {
    "aligner/models/gpt/decode/kv_cache.py": ("__init__", Kind.KV_CACHE),
    "aligner/models/gpt/megatron/optimizer.py": (None, Kind.OPTIMIZER),
    "aligner/models/gpt/dtensor/optimizer.py": (None, Kind.OPTIMIZER),
    "aligner/models/gpt/role/optimizer_step.py": (None, Kind.OPTIMIZER),
    # FSDP2: what is gathered for a pass, and gradients before and after they are scattered.
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
    """Kernels of one dtype that do as much arithmetic and move as many bytes of memory."""

    dtype: torch.dtype
    flops: int
    moved_bytes: int  # operands and results
    is_attention: bool = False


def _grouped_flops(rows: Tensor, matrices: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Rows that are shared out over groups, or columns: each meets one group's matrix."""
    return 2 * rows.shape[0] * rows.shape[1] * matrices.shape[-1]


# What torch's table has no formula for.
_FORMULAS = {_aten._grouped_mm: _grouped_flops}


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind among the same processes."""

    name: str  # as c10d has it: allreduce_, _allgather_base_, send, …
    ranks: tuple[int, ...]
    overlaps: bool = False  # runs beside kernels: asynchronous, or on another stream

    @property
    def group_size(self) -> int:
        """Processes that take part."""
        return len(self.ranks)

    def wire_bytes(self, size: int) -> float:
        """Bytes that each process sends of operands of ``size`` bytes, by a ring's algorithms.

        What is received is not counted again.
        """
        others = (self.group_size - 1) / max(1, self.group_size)
        if self.name.startswith("recv"):
            return 0.0
        if self.name.startswith(("send", "broadcast")):
            return float(size) if others else 0.0
        return size * others * (2 if self.name.startswith("allreduce") else 1)


class Snapshot(NamedTuple):
    """Bytes alive at one moment, by kind."""

    total: int
    kinds: dict[Kind, int]


@dataclass(eq=False)  # two blocks that do nothing are still two
class Record:
    """Counts of one block, and memory as it stands.

    ``collectives`` counts calls and bytes, those of the larger operand: what is reduced or
    broadcast, the whole of what is gathered or scattered.
    """

    kernels: Counter[Kernel] = field(default_factory=Counter)
    # Times that the host waited for the device, by the function of the library or of megatron-core.
    host_waits: Counter[str] = field(default_factory=Counter)
    graphed: int = 0  # kernels that came with others, as one launch of a CUDA graph
    copied_bytes: int = 0  # between host and device
    collectives: dict[Collective, tuple[int, int]] = field(default_factory=dict)
    # Most bytes alive at once on the device, those from before included, by the function of the
    # library or of megatron-core that allocated last; "" is the beginning.
    peaks: dict[str, Snapshot] = field(default_factory=dict)

    @property
    def host_reads(self) -> int:
        """Times that the host waited for the device, mostly for a value of it."""
        return self.host_waits.total()

    @property
    def launches(self) -> int:
        """Operations that are kernels, no views or allocations; a CUDA graph is one."""
        return sum(self.kernels.values()) - self.graphed

    @property
    def flops(self) -> Counter[torch.dtype]:
        """Floating-point operations of matrix products and attention, by the operands' dtype."""
        found: Counter[torch.dtype] = Counter()
        for kernel, count in self.kernels.items():
            if kernel.flops:
                found[kernel.dtype] += kernel.flops * count
        return found

    @property
    def peak_at(self) -> str:
        """Place where memory was fullest: a function; "" is the beginning."""
        return max(self.peaks, key=lambda place: self.peaks[place].total, default="")

    @property
    def peak(self) -> Snapshot:
        """Memory in use there."""
        return self.peaks.get(self.peak_at, Snapshot(0, {}))

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once on the device, those from before included."""
        return self.peak.total

    def saw_kernel(self, kernel: Kernel, copied_bytes: int = 0) -> None:
        """Count one kernel; ``copied_bytes``: what it copies between host and device."""
        self.kernels[kernel] += 1
        self.copied_bytes += copied_bytes

    def saw_collective(
        self, name: str, ranks: Iterable[int], size: int, overlaps: bool = False
    ) -> None:
        """Count one collective of ``size`` bytes; ``overlaps``: it runs beside kernels."""
        key = Collective(name, tuple(ranks), overlaps)
        calls, total = self.collectives.get(key, (0, 0))
        self.collectives[key] = (calls + 1, total + size)

    def saw_memory(self, memory: "Memory", place: str) -> None:
        """Note what is alive once the code at ``place`` has allocated."""
        known = self.peaks.get(place)
        if known is None or memory.alive_bytes > known.total:
            self.peaks[place] = memory.snapshot()


class Memory:
    """Bytes of the device that are alive, by storages and by kind."""

    def __init__(self, device_type: str, block: int) -> None:
        """Tensors of ``device_type``, in blocks of ``block`` bytes."""
        self.device_type = device_type
        self._block = block
        self.alive_bytes = 0
        self.kinds: Counter[Kind] = Counter()
        self._known: weakref.WeakKeyDictionary[Any, _Block] = weakref.WeakKeyDictionary()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor (any shape) is on this device."""
        return tensor.device.type == self.device_type

    def snapshot(self) -> Snapshot:
        """Memory in use now."""
        return Snapshot(self.alive_bytes, {kind: n for kind, n in self.kinds.items() if n})

    def saw(self, tensor: Tensor) -> bool:
        """Count the tensor's storage (any shape), once; return True if it is new."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return False
        block = _Block(allocated_kind())
        self._known[storage] = block
        self._set(block, storage.nbytes())
        weakref.finalize(storage, self._set, block, 0)
        return True

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a known storage anew, whose size was changed."""
        if storage in self._known:
            self._set(self._known[storage], storage.nbytes())

    def name(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Record the use of the storages of those tensors (any shape) that are on the device."""
        for tensor in tensors:
            if self.holds(tensor):
                self.saw(tensor)
                block = self._known[tensor.untyped_storage()]
                self.kinds[block.kind] -= block.size
                self.kinds[kind] += block.size
                block.kind = kind

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """Record tensors (any shape) written by a collective; activations become communication."""
        self.name(
            Kind.COMMUNICATION,
            [each for each in tensors if self._kind_of(each) is Kind.ACTIVATIONS],
        )

    @contextlib.contextmanager
    def beside(self, kind: Kind, size: int) -> Iterator[None]:
        """Count ``size`` bytes that no tensor of ours has, for as long as the block runs."""
        block = _Block(kind)
        self._set(block, size)
        yield
        self._set(block, 0)

    def _kind_of(self, tensor: Tensor) -> Kind | None:
        block = self._known.get(tensor.untyped_storage())
        return None if block is None else block.kind

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
    """Kind of an allocation by the code that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        known = _kind_of_file(frame.f_code.co_filename)
        if known is not None and known[0] in (None, frame.f_code.co_name):
            return known[1]
        frame = frame.f_back
    return Kind.ACTIVATIONS


def running_place() -> str:
    """The innermost function of the library or of megatron-core that runs now: file and name."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        stem = _stem_of_file(frame.f_code.co_filename)
        if stem:
            direction = " (backward)" if torch._C._current_graph_task_id() != -1 else ""
            return f"{stem}.{frame.f_code.co_name}{direction}"
        frame = frame.f_back
    return "backward"


@cache
def _kind_of_file(path: str) -> tuple[str | None, Kind] | None:
    return next((kind for end, kind in _ALLOCATING.items() if path.endswith(end)), None)


@cache
def _stem_of_file(path: str) -> str:
    """File name without suffix; empty for code that is neither ours nor megatron-core's."""
    return Path(path).stem if path.startswith(_LIBRARIES) and not path.startswith(_DRY) else ""


def _bytes(tensor: Tensor) -> int:
    """Bytes of the values, or of the storage where an expanded tensor repeats them."""
    return min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes())


def _moved(func: Any, operands: list[Tensor], results: list[Tensor]) -> int:
    if func.overloadpacket in _LOOKUPS:
        return 2 * sum(map(_bytes, results))
    if func.overloadpacket in _SCATTERS:
        return 2 * sum(map(_bytes, operands[1:]))
    return sum(map(_bytes, operands)) + sum(map(_bytes, results))


def counted(operation: Operation) -> Callable[[Record], None]:
    """A function that counts an operation on the device in a record; nothing if it is no kernel."""
    func, args, kwargs, out, operands, results = operation
    if not is_kernel(func):
        return lambda record: None
    packet = _SAME_FLOPS.get(func.overloadpacket, func.overloadpacket)
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    attends = flops > 0 and "attention" in packet.__name__
    kernel = kernel_of(operands, results, flops, _moved(func, operands, results), attends)
    copied = 0
    if len({each.device.type for each in (*operands, *results) if each.dim()}) > 1:
        copied = max(map(_bytes, (*operands, *results)))
    return lambda record: record.saw_kernel(kernel, copied)


def kernel_of(
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    flops: int = 0,
    moved_bytes: int | None = None,
    is_attention: bool = False,
) -> Kernel:
    """A kernel that reads its operands and writes its results once by default.

    Tensors may have any shape and dtype.
    """
    first = operands[0] if operands else results[0]
    if moved_bytes is None:
        moved_bytes = sum(map(_bytes, (*operands, *results)))
    return Kernel(first.dtype, flops, moved_bytes, is_attention)


@cache
def is_kernel(func: Any) -> bool:
    """Return whether an operation is a kernel, no view or allocation."""
    if func.namespace == "prim" or func.overloadpacket in _ALLOCATIONS:
        return False
    returns = func._schema.returns
    aliases = (each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return not any(aliases)


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
