"""Dispatch of operations on the dry device: known values are followed, all operations counted."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aligner.errors import DryDeviceError
from aligner_plan.dry.known import KnownValues, Operation, tensors_in
from aligner_plan.dry.rules import refuse_operands, refuse_wide

_aten = torch.ops.aten
# Operations whose operands, if known, are assumed to have the same values in every process.
_REDUCED = {torch.ops.c10d.allreduce_, torch.ops.c10d.broadcast_, torch.ops.c10d.send}
_GATHERED = {torch.ops.c10d._allgather_base_}
# Collectives that return their results, by the in-place collective with the same cost.
_FUNCTIONAL = {
    torch.ops._c10d_functional.all_reduce: torch.ops.c10d.allreduce_,
    torch.ops._c10d_functional.all_gather_into_tensor: torch.ops.c10d._allgather_base_,
    torch.ops._c10d_functional.reduce_scatter_tensor: torch.ops.c10d._reduce_scatter_base_,
    torch.ops._c10d_functional.all_to_all_single: torch.ops.c10d.alltoall_base_,
    torch.ops._c10d_functional.broadcast: torch.ops.c10d.broadcast_,
}
_UNKNOWN = {torch.float64: 1.0, torch.float32: 1.0, torch.bfloat16: 1.0, torch.bool: False}


class Operations(TorchDispatchMode):
    """Dispatch mode for every operation below autograd.

    ``observer``: the `DryDevice`, which counts operations, host reads and collectives.
    """

    def __init__(self, observer: Any) -> None:
        super().__init__()
        self.observer = observer
        self.known = KnownValues()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled on the dry device, so operations need no protection from dynamo.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Operations that are dispatched in another way.
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # DTensor dispatches operations on its local tensors
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func.overloadpacket in _FUNCTIONAL:
            return self._communicate_functionally(func, args, kwargs)
        has_kernel = func is _aten._fused_rms_norm.default and args[0].is_cuda
        if func.namespace == "aten" and torch.is_inference_mode_enabled() and not has_kernel:
            # In inference mode composite operations arrive undecomposed.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # Operations that read values.
        if func is _aten._local_scalar_dense.default:
            return self.read(args[0])
        if func is _aten.equal.default:
            return self._equal(*args)
        if func is _aten.nonzero.default:
            return self._nonzero(func, args[0])
        if func is _aten.masked_select.default:
            return self._select(func, *args)
        if func is _aten.index.Tensor:
            args = (args[0], self._positions(args[1]))
        # All others.
        refuse_operands(func, args, kwargs)
        if func is _aten._grouped_mm.default and args[0].dtype == torch.float32:
            # torch's function of shapes refuses float32, which the kernel supports.
            out = func(*(matrix.bfloat16() for matrix in args[:2]), *args[2:], **kwargs).float()
        else:
            out = func(*args, **kwargs)
        operation = Operation.of(func, args, kwargs, out)
        for tensor in operation.results:
            tensor.constant = None  # a fake tensor would follow scalars on the device, too
            refuse_wide(tensor)
        if self.observer.runs:
            self.known.follow(operation)
        self.observer.saw(operation)
        return out

    # Values that the host reads ---------------------------------------------------------------

    def read(self, tensor: Tensor) -> Any:
        """Return `Tensor.item` of a scalar."""
        self.observer.saw_host_read(tensor)
        value = self.known.of(tensor)
        if value is None:
            return _UNKNOWN.get(tensor.dtype, 1)
        with _disable_current_modes():
            return value.item()

    def read_all(self, tensor: Tensor) -> Any:
        """Return `Tensor.tolist` of any shape, with one wait for the device."""
        self.observer.saw_host_read(tensor)
        value = self.known.of(tensor)
        with _disable_current_modes():
            if value is None:
                value = torch.full(tensor.shape, _UNKNOWN.get(tensor.dtype, 1))
            return value.tolist()

    def array(self, tensor: Tensor) -> Any:
        """Return `Tensor.numpy` on the host, any shape. Unknown bytes are 0: they are only copied.

        It does not count as a read, because the array shares the tensor's memory.
        """
        value = self.known.of(tensor)
        with _disable_current_modes():
            if value is None and tensor.dtype is torch.uint8:
                value = torch.zeros(tensor.shape, dtype=torch.uint8)
            if value is None:
                raise DryDeviceError(
                    f"numpy() of a {list(tensor.shape)} {tensor.dtype} tensor, whose values the "
                    "dry device does not compute"
                )
            return value.numpy()

    def _equal(self, left: Tensor, right: Tensor) -> bool:
        self.observer.saw_host_read(left)
        values = self.known.of(left), self.known.of(right)
        if values[0] is None or values[1] is None:
            return left.shape == right.shape
        with _disable_current_modes():
            return torch.equal(values[0], values[1])

    def _nonzero(self, func: Any, mask: Tensor) -> Tensor:
        self.observer.saw_host_read(mask)  # for the size of the result
        value = self.known.of(mask)
        if value is None:
            raise DryDeviceError(
                f"the number of nonzero elements of a {list(mask.shape)} {mask.dtype} tensor "
                "depends on weights or random numbers, which the dry device does not compute"
            )
        with _disable_current_modes():
            indices = value.nonzero()
        # PyTorch's meshes leave the fake mode temporarily.
        with mask.fake_mode if isinstance(mask, FakeTensor) else contextlib.nullcontext():
            tensor = torch.empty(indices.shape, dtype=indices.dtype, device=mask.device)
        self.known.set(tensor, indices)
        self.observer.saw(Operation.of(func, (mask,), {}, tensor))
        return tensor

    def _select(self, func: Any, tensor: Tensor, mask: Tensor) -> Tensor:
        count = self._nonzero(_aten.nonzero.default, mask).shape[0]
        selected = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
        values = self.known.of(tensor), self.known.of(mask)
        with _disable_current_modes():
            value = None if None in values else torch.masked_select(*values)
        self.known.set(selected, value)
        self.observer.saw(Operation.of(func, (tensor, mask), {}, selected))
        return selected

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replace masks by positions in the indices of `aten.index`."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                positions.append(index)
                continue
            nonzero = self._nonzero(_aten.nonzero.default, index)
            for axis in range(index.dim()):
                column = nonzero.select(1, axis)
                arguments = (nonzero, 1, axis)
                self.known.follow(Operation.of(_aten.select.int, arguments, {}, column))
                positions.append(column)
        return positions

    # Communication ----------------------------------------------------------------------------

    def _communicate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count a collective, which ends at once and whose gathered results become unknown."""
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        named = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        group = dist.ProcessGroup.unbox(named["process_group"])
        self.observer.saw_collective(
            func.overloadpacket,
            args,
            dist.get_process_group_ranks(group),
            bool(named.get("async_op")),
        )
        if func.overloadpacket in _GATHERED:
            self._gather(args[0], args[1], group.size())
        elif group.size() > 1 and func.overloadpacket not in _REDUCED:
            for tensor in tensors_in(args[0]):
                self.known.forget(tensor)
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work

    def _communicate_functionally(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count a collective that returns its result, as collectives of DTensor do."""
        names = (argument.name for argument in func._schema.arguments)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        group = _resolve_process_group(named["group_name"])
        out = func(*args, **kwargs)
        self.observer.saw(Operation.of(_aten.empty.memory_format, (), {}, out))
        packet, ranks = _FUNCTIONAL[func.overloadpacket], dist.get_process_group_ranks(group)
        self.observer.saw_collective(packet, (out, args[0]), ranks)
        return out

    def _gather(self, gathered: Tensor, share: Tensor, ranks: int) -> None:
        value = self.known.of(share)
        self.known.forget(gathered)
        if value is not None:
            with _disable_current_modes():
                self.known.set(gathered, torch.cat([value] * ranks).view(gathered.shape))
