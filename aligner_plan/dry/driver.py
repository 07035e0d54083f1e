"""The driver of the GPU that is not there: `torch.cuda`, its kernels, memory between processes."""

import inspect
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing import reductions

from aligner.errors import DryDeviceError
from aligner.models.gpt.layers import elementwise
from aligner_plan.dry.graphs import graph_class
from aligner_plan.dry.known import KnownValues, tensors_in
from aligner_plan.dry.replacements import Replacement, answers
from aligner_plan.dry.streams import Order, Process, stream_classes

_aten = torch.ops.aten
_OTHER_NUMBER = 7  # the device's, where it was exported
_PARAMETERS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)


def gpu_replacements(gpu: Any) -> Iterator[Replacement]:
    """Replacements of calls on ``gpu``, a `DryDevice`."""
    cuda = torch.cuda
    state = torch.zeros(16, dtype=torch.uint8)
    properties = SimpleNamespace(uuid="dry", total_memory=gpu.memory_bytes)
    for name, answer in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 8,
        "empty_cache": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "set_rng_state": None,
        "_lazy_init": None,
        "get_device_name": "dry GPU",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
    }.items():
        yield cuda, name, answers(answer)
    current = [0]
    yield cuda, "current_device", lambda: current[0]
    yield cuda, "set_device", lambda each: current.__setitem__(0, torch.device(each).index)
    for holder in (cuda, cuda.random):
        yield holder, "get_rng_state", lambda device=None: state.clone()
    yield cuda.nccl, "version", answers((2, 29, 3))
    yield cuda, "CUDAGraph", graph_class(gpu.records, gpu.known, gpu.order, gpu.capturing)
    yield cuda, "graph_pool_handle", answers(None)
    for name in ("range_push", "range_pop"):
        yield cuda.nvtx, name, answers(None)
    yield from _stream_calls(gpu)
    exports = Exports(gpu.order)
    yield reductions, "reduce_tensor", exports.reduce
    yield megatron_random, "_set_cuda_rng_state", answers(None)
    yield FakeTensorMode, "avoid_device_init", property(lambda mode: True)
    yield F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)
    yield elementwise, "missing_for_kernels", answers(None)
    for module in (elementwise, fused_bias_dropout, fused_bias_swiglu):
        for name, function in list(vars(module).items()):
            if hasattr(function, "_torchdynamo_orig_callable"):
                whole = function._torchdynamo_orig_callable
                yield module, name, gpu.one_kernel(whole)


def _stream_calls(gpu: Any) -> Iterator[Replacement]:
    """Streams, events, and what orders the host and them."""
    cuda, order = torch.cuda, gpu.order
    stream_class, event_class = stream_classes(order, gpu.saw_host_wait)
    # Kept by the class: without this a second device in a process gets the stream of the first.
    yield MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None

    def synchronize(device: Any = None) -> None:
        gpu.saw_host_wait()
        order.host_waits()

    def lock(location: int, size: int, flags: int) -> int:
        del flags
        gpu.pending_error = gpu.refuses_locks or order.is_locked(location)
        if not gpu.pending_error:
            order.lock(range(location, location + size))
        return int(gpu.pending_error)  # 0: success

    yield cuda, "synchronize", synchronize
    yield cuda, "Stream", stream_class
    yield cuda, "Event", event_class
    yield cuda, "current_stream", lambda device=None: stream_class(lane=order.stream)
    yield cuda, "default_stream", lambda device=None: stream_class(lane=order.process.default)
    yield cuda, "stream", lambda each: order.on_stream(None if each is None else each.lane)
    yield (
        cuda,
        "cudart",
        answers(SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=order.unlock)),
    )
    yield Tensor, "record_stream", lambda own, stream: order.record_stream(own, stream.lane)


def _attention(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda query, *args, **kwargs: (_attend if query.is_cuda else real)(
        query, *args, **kwargs
    )


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
    flash = attn_mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and not flash:  # the other kernels know no grouped queries
        return _aten._scaled_dot_product_attention_math(
            *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=True
        )[0]
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if flash:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # becomes a bias
            attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


class Exports:
    """CUDA IPC: memory of the device that one process exports and another opens.

    It is kept until it is opened, as on a GPU, where memory that is not opened is never freed. The
    device has number 0 in every process; an export names another, for numbers are each process's
    own.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._count = 0
        self._unopened: dict[int, tuple[Tensor, Process]] = {}

    def reduce(self, tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Stand-in for `torch.multiprocessing.reductions.reduce_tensor`, of any shape and dtype."""
        if not tensor.is_cuda:
            raise DryDeviceError(f"a tensor on {tensor.device} is no memory of the device")
        self._count += 1
        self._unopened[self._count] = tensor.detach(), self._order.process
        given = {"storage_device": _OTHER_NUMBER, "storage_handle": self._count}
        return self.open, tuple(given.get(name) for name in _PARAMETERS)

    def open(self, *arguments: Any) -> Tensor:
        """Stand-in for `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""
        given = dict(zip(_PARAMETERS, arguments, strict=True))
        if given["storage_device"] != 0:
            raise DryDeviceError(f"this process has no device {given['storage_device']}, only 0")
        tensor, exporter = self._unopened.pop(given["storage_handle"])
        # Its host has sent this one the place of the memory.
        self._order.process.host.wait_for(exporter.host.moment())
        return tensor


class _Made(NamedTuple):
    """A tensor that a function made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class RememberedKernel:
    """A function that `torch.compile` would make one kernel of, run once for given shapes.

    Its result has the same shape whenever its arguments have, and on the dry device shapes are all
    there is: calls with tensors of shapes that it was called with before only allocate.
    Where gradients are followed, a value is known, or the result is a view, it is run.
    """

    def __init__(self, function: Callable[..., Any], known: KnownValues) -> None:
        self._function, self._known = function, known
        self._made: dict[Hashable, _Made] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the function, as far as its shape goes."""
        operands = tensors_in((args, kwargs))
        if (torch.is_grad_enabled() and any(each.requires_grad for each in operands)) or not any(
            self._known.of(each) is None for each in operands
        ):
            return self._function(*args, **kwargs)
        given = (tuple(map(_given, args)), tuple((key, _given(kwargs[key])) for key in kwargs))
        if given in self._made:
            made = self._made[given]
            return torch.empty_strided(
                made.shape, made.stride, dtype=made.dtype, device=made.device
            )
        result = self._function(*args, **kwargs)
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if all(each.untyped_storage()._cdata != storage._cdata for each in operands):
                self._made[given] = _Made(
                    tuple(result.shape), result.stride(), result.dtype, result.device
                )
        return result


def _given(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    return argument if isinstance(argument, Hashable) else repr(argument)
