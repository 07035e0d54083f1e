"""The dry device: fake tensors on ``cuda``, fake process groups, and every replaced call.

What a real GPU computes is unknown here, except for what follows from values of the host (`known`).
A value that the host reads and that is unknown is 1.0, 1 or False: a finite loss, no end of a
sequence.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aligner.distributed import accelerator
from aligner.dry.known import KnownValues, tensors_in
from aligner.dry.record import Kind, Memory, Record, running_place
from aligner.errors import DryDeviceError
from aligner.models.gpt import megatron

_aten = torch.ops.aten
# Of values that the host knows, every process is taken to have the same.
_SAME_ON_ALL_RANKS = {torch.ops.c10d.allreduce_, torch.ops.c10d.broadcast_, torch.ops.c10d.send}
_UNKNOWN = {torch.float64: 1.0, torch.float32: 1.0, torch.bfloat16: 1.0, torch.bool: False}


class DryDevice(contextlib.AbstractContextManager["DryDevice"]):
    """One GPU among ``world_size``, in the place of process ``rank``.

    Enter it in a process of its own, after `aligner.dry.guard.load_guard` and before megatron-core
    is used. ``memory`` counts what is alive; `record` counts what a block does.
    """

    def __init__(self, world_size: int = 1, rank: int = 0, *, memory_bytes: int = 80 << 30) -> None:
        self.world_size = world_size
        self.rank = rank
        self.memory_bytes = memory_bytes
        self.memory = Memory()
        self._records: list[Record] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "DryDevice":
        with contextlib.ExitStack() as stack:
            for target, name, replacement in self._replacements():
                stack.enter_context(mock.patch.object(target, name, replacement))
            accelerator.has_gpu.cache_clear()
            stack.callback(accelerator.has_gpu.cache_clear)
            dist.init_process_group(
                "fake", store=FakeStore(), rank=self.rank, world_size=self.world_size
            )
            stack.callback(_destroy_groups)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            operations = stack.enter_context(_Operations(self))
            stack.enter_context(_Calls(operations))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def record(self) -> Iterator[Record]:
        """Count what the block does; blocks may be nested."""
        record = Record(peaks={"": self.memory.snapshot()})
        self._records.append(record)
        try:
            yield record
        finally:
            self._records.remove(record)

    def holds(self, model: nn.Module) -> None:
        """Name the weights and gradient buffers of a model that is ready to train, or never will.

        Other kinds are told by the code that allocates.
        """
        for tensor in (*model.parameters(), *nn.Module.buffers(model)):
            gradients = [getattr(tensor, name, None) for name in ("main_grad", "grad")]
            self.memory.name(Kind.WEIGHTS, [_local(tensor.data)])
            there = (_local(each) for each in gradients if each is not None)
            self.memory.name(Kind.GRADIENTS, there)

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        on_device = [each for each in tensors_in(out) if each.is_cuda]
        new = [tensor for tensor in on_device if self.memory.saw(tensor)]
        if new and self._records:
            place = running_place()
            for record in self._records:
                record.saw_memory(self.memory, place)
        for record in self._records:
            if on_device or any(each.is_cuda for each in tensors_in((args, kwargs))):
                record.saw(func, args, kwargs, out)

    def _saw_host_read(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            for record in self._records:
                record.host_reads += 1

    def _saw_collective(self, func: Any, operands: Sequence[Any], ranks: Sequence[int]) -> None:
        sizes = (sum(each.nbytes for each in tensors_in(operand)) for operand in operands)
        size = max(sizes, default=0)
        self.memory.wrote(tensors_in(operands[0]))
        for record in self._records:
            record.saw_collective(func.overloadpacket.__name__, ranks, size)

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Everything that asks a driver, a process or a kernel that is not there."""
        cuda = torch.cuda
        state = torch.zeros(16, dtype=torch.uint8)
        for name, answer in {
            "is_available": True,
            "is_initialized": True,
            "device_count": 1,
            "current_device": 0,
            "set_device": None,
            "synchronize": None,
            "empty_cache": None,
            "manual_seed": None,
            "manual_seed_all": None,
            "set_rng_state": None,
            "_lazy_init": None,
            "get_device_name": "dry GPU",
            "get_device_capability": (9, 0),
            "mem_get_info": (self.memory_bytes, self.memory_bytes),
        }.items():
            yield cuda, name, _answers(answer)
        for holder in (cuda, cuda.random):
            yield holder, "get_rng_state", lambda device=None: state.clone()
        for name in ("Stream", "Event"):
            yield cuda, name, _Stream
        for name in ("current_stream", "default_stream", "stream"):
            yield cuda, name, _Stream
        for name in ("range_push", "range_pop"):
            yield cuda.nvtx, name, _answers(None)
        yield megatron_random, "_set_cuda_rng_state", _answers(None)
        yield FakeTensorMode, "avoid_device_init", property(lambda mode: True)
        yield nn.Module, "_apply", _apply
        yield torch.UntypedStorage, "resize_", _resize(self.memory)
        for holder in (dist, dist.distributed_c10d):
            yield holder, "new_group", _new_group(dist.new_group)
            yield holder, "all_gather_object", _all_gather_object
            yield holder, "gather_object", _answers(None)
            yield holder, "broadcast_object_list", _answers(None)
            yield holder, "_coalescing_manager", _coalescing_manager
        yield megatron, "broadcast_floats", _broadcast_floats
        yield P2PCommunicator, "_communicate", _communicate(P2PCommunicator._communicate)
        yield P2PCommunicator, "_communicate_shapes", _communicate_shapes


class _Operations(TorchDispatchMode):
    """Every operation below autograd: known values are followed, the rest is counted and faked."""

    def __init__(self, device: DryDevice) -> None:
        super().__init__()
        self.device = device
        self.known = KnownValues()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func.namespace == "aten" and torch.is_inference_mode_enabled():
            # Operations that are made of others come here whole.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func is _aten._local_scalar_dense.default:
            return self._read(args[0])
        if func is _aten.equal.default:
            return self._equal(*args)
        if func is _aten.nonzero.default:
            return self._nonzero(func, args[0])
        if func is _aten.index.Tensor:
            args = (args[0], self._positions(args[1]))
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            tensor.constant = None  # fake tensors follow single numbers too, on a real device
        self.known.follow(func, args, kwargs, out)
        self.device._saw(func, args, kwargs, out)
        if func is _aten._to_copy.default and not out.is_cuda and not kwargs.get("non_blocking"):
            self.device._saw_host_read(args[0])
        return out

    # What the host reads ----------------------------------------------------------------------

    def _read(self, tensor: Tensor) -> Any:
        self.device._saw_host_read(tensor)
        value = self.known.of(tensor)
        if value is None:
            return _UNKNOWN.get(tensor.dtype, 1)
        with _disable_current_modes():
            return value.item()

    def read_all(self, tensor: Tensor) -> Any:
        """`Tensor.tolist`, which waits for the device once."""
        self.device._saw_host_read(tensor)
        value = self.known.of(tensor)
        with _disable_current_modes():
            if value is None:
                value = torch.full(tensor.shape, _UNKNOWN.get(tensor.dtype, 1))
            return value.tolist()

    def _equal(self, left: Tensor, right: Tensor) -> bool:
        self.device._saw_host_read(left)
        values = self.known.of(left), self.known.of(right)
        if values[0] is None or values[1] is None:
            return left.shape == right.shape
        with _disable_current_modes():
            return torch.equal(values[0], values[1])

    def _nonzero(self, func: Any, mask: Tensor) -> Tensor:
        self.device._saw_host_read(mask)  # the size of the answer
        value = self.known.of(mask)
        if value is None:
            raise DryDeviceError(
                f"how many elements of a {list(mask.shape)} {mask.dtype} tensor are not 0 follows "
                "from weights or random numbers, which the dry device does not compute"
            )
        with _disable_current_modes():
            found = value.nonzero()
        tensor = torch.empty(found.shape, dtype=found.dtype, device=mask.device)
        self.known.set(tensor, found)
        self.device._saw(func, (mask,), {}, tensor)
        return tensor

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices of `aten.index`, with masks replaced by positions."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                positions.append(index)
            else:
                found = self._nonzero(_aten.nonzero.default, index)
                for axis in range(index.dim()):
                    column = found.select(1, axis)
                    self.known.follow(_aten.select.int, (found, 1, axis), {}, column)
                    positions.append(column)
        return positions

    # Communication ----------------------------------------------------------------------------

    def _communicate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count a collective; it ends at once and leaves its outputs unknown where they gather."""
        named = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
        group = dist.ProcessGroup.unbox({**named, **kwargs}["process_group"])
        self.device._saw_collective(func, args, dist.get_process_group_ranks(group))
        if group.size() > 1 and func.overloadpacket not in _SAME_ON_ALL_RANKS:
            for tensor in tensors_in(args[0]):
                self.known.forget(tensor)
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work


class _Calls(TorchFunctionMode):
    """Calls above autograd that fake tensors do not have, or answer otherwise than a GPU does."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            value = self.operations.known.of(args[0])
            if value is None:
                raise DryDeviceError(
                    f"numpy() of a {list(args[0].shape)} {args[0].dtype} tensor, whose values "
                    "the dry device does not compute"
                )
            with _disable_current_modes():
                return value.numpy()
        if func is Tensor.tolist and isinstance(args[0], FakeTensor):
            return self.operations.read_all(args[0])
        if func is F.scaled_dot_product_attention and args[0].is_cuda:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that a GPU takes; a CPU build of PyTorch would choose the one without a kernel."""
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = torch.zeros(
            *query.shape[:-1], key.shape[-2], dtype=query.dtype, device=query.device
        )
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


class _Stream:
    """A stream, an event, and the context of either: nothing is ever waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _answers(None)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _answers(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` by new parameters: fake tensors cannot take each other's place."""
    for module in self.modules() if recurse else [self]:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                moved = fn(parameter)
            if moved is not parameter:
                new = nn.Parameter(moved, requires_grad=parameter.requires_grad)
                for key, value in vars(parameter).items():  # such as sequence_parallel
                    vars(new).setdefault(key, value)
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return self


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _resize(memory: Memory) -> Callable[..., Any]:
    real = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        result = real(self, size)
        memory.resized(self)
        return result

    return resize


def _new_group(real: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "backend": "fake"})

    return new_group


def _all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _broadcast_floats(values: Any, *_: Any) -> dict[str, float]:
    """Metrics of the last pipeline stage, which other stages are told."""
    return dict(values or {"loss": 1.0})


def _communicate(real: Callable[..., Any]) -> Callable[..., Any]:
    """Between pipeline stages: nobody says what shape comes, so it is remembered.

    A gradient has the shape of what was sent, in the same order. Hidden states have the shape that
    the schedule expects, so on later stages micro-batches must be of one length.
    """

    def communicate(self: Any, **kwargs: Any) -> Any:
        sent = vars(self).setdefault("_dry_sent", [])
        if kwargs["tensor_send_next"] is not None:
            sent.append(tuple(kwargs["tensor_send_next"].shape))
        self._dry_shapes = (
            tuple(kwargs["tensor_shape"]) if kwargs["recv_prev"] else None,
            sent.pop(0) if kwargs["recv_next"] else None,
        )
        return real(self, **kwargs)

    return communicate


def _communicate_shapes(self: Any, *_: Any) -> tuple[Any, Any]:
    return self._dry_shapes


class _Work:
    """Handle of coalesced collectives, which are counted one by one."""

    def wait(self) -> bool:
        return True

    def append(self, work: object) -> None:
        return None


@contextlib.contextmanager
def _coalescing_manager(*_: Any, **__: Any) -> Iterator[_Work]:
    yield _Work()


def _destroy_groups() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
