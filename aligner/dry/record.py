"""What a block of code did on the dry device: memory, arithmetic, communication, host reads."""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_BLOCK = 512  # bytes; PyTorch's allocator on GPUs gives memory in multiples of it
# In-place forms that torch's table of formulas leaves out, by the one that costs the same.
_SAME_FLOPS = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind among as many processes."""

    name: str  # as c10d has it: allreduce_, _allgather_base_, send, …
    group_size: int


@dataclass
class Record:
    """Counts of one block, and memory as it stands.

    ``collectives`` counts calls and bytes, those of the larger operand: what is reduced or
    broadcast, the whole of what is gathered or scattered.
    """

    launches: int = 0  # operations that are kernels: no views, no allocations
    host_reads: int = 0  # values of the device that the host waited for
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    collectives: dict[Collective, tuple[int, int]] = field(default_factory=dict)
    peak_bytes: int = 0  # most bytes alive at once on the device, those from before included

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count one operation on the device."""
        if not _is_kernel(func):
            return
        self.launches += 1
        packet = _SAME_FLOPS.get(func.overloadpacket, func.overloadpacket)
        formula = flop_registry.get(packet)
        if formula is not None:
            operand = next(each for each in tree_leaves(args) if isinstance(each, Tensor))
            self.flops[operand.dtype] += formula(*args, **kwargs, out_val=out)

    def saw_collective(self, name: str, group_size: int, size: int) -> None:
        """Count one collective of ``size`` bytes."""
        key = Collective(name, group_size)
        calls, total = self.collectives.get(key, (0, 0))
        self.collectives[key] = (calls + 1, total + size)


class Memory:
    """Bytes of the device that are alive, by storages."""

    def __init__(self) -> None:
        self.alive_bytes = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def saw(self, tensor: Tensor) -> None:
        """Count the tensor's storage, once."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._known[storage] = size
        self.alive_bytes += size
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.alive_bytes -= size


def _is_kernel(func: Any) -> bool:
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
}
