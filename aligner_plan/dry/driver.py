"""Replacement of the GPU's driver: `torch.cuda`, its kernels, memory shared between processes."""

import inspect
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing import reductions

from aligner.errors import DryDeviceError
from aligner.models.gpt.layers import fusions
from aligner_plan.dry.graphs import Graph
from aligner_plan.dry.known import KnownValues, tensors_in
from aligner_plan.dry.replacements import Replacement, constant
from aligner_plan.dry.streams import Order, Process, stream_classes

_aten = torch.ops.aten
_EXPORTED_DEVICE = 7  # index of the device in the exporting process
_PARAMETERS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
# A CPU build of PyTorch has no GPU kernel of this norm, and autograd would record the norm's parts,
# with operands in float32. With any entry for the GPU, autograd saves the operands of the kernel.
# A build for GPUs keeps its kernel, which benchmarks on a GPU use in the process that plans.
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"):
    _kernels = torch.library.Library("aten", "IMPL")
    _kernels.impl("_fused_rms_norm", lambda *_: NotImplemented, "CUDA")


def gpu_replacements(gpu: Any) -> Iterator[Replacement]:
    """Replace calls of a GPU. ``gpu``: a `DryDevice`."""
    cuda = torch.cuda
    # Properties and state of the device.
    properties = SimpleNamespace(uuid="dry", total_memory=gpu.memory_bytes)
    for name, result in {
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
        "graph_pool_handle": None,
    }.items():
        yield cuda, name, constant(result)
    current = [0]
    yield cuda, "current_device", lambda: current[0]
    yield cuda, "set_device", lambda device: current.__setitem__(0, torch.device(device).index)
    state = torch.zeros(16, dtype=torch.uint8)
    for module in (cuda, cuda.random):
        yield module, "get_rng_state", lambda device=None: state.clone()
    yield cuda.nccl, "version", constant((2, 29, 3))
    for name in ("range_push", "range_pop"):
        yield cuda.nvtx, name, constant(None)
    yield megatron_random, "_set_cuda_rng_state", constant(None)
    yield FakeTensorMode, "avoid_device_init", property(lambda mode: True)
    # Streams, graphs and memory that is shared between processes.
    yield cuda, "CUDAGraph", type("CUDAGraph", (Graph,), {"device": gpu})
    yield from _stream_calls(gpu)
    yield reductions, "reduce_tensor", Exports(gpu.order).reduce
    # Kernels.
    real_attention = F.scaled_dot_product_attention

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (_gpu_attention if query.is_cuda else real_attention)(query, *args, **kwargs)

    yield F, "scaled_dot_product_attention", attention
    yield fusions, "missing_for_kernels", constant(None)
    for module in (fusions, fused_bias_dropout, fused_bias_swiglu):
        for name, function in list(vars(module).items()):
            if hasattr(function, "_torchdynamo_orig_callable"):
                yield module, name, gpu.one_kernel(function._torchdynamo_orig_callable)


def _stream_calls(gpu: Any) -> Iterator[Replacement]:
    """Replace streams, events, and calls that order the host and streams."""
    cuda, order = torch.cuda, gpu.order
    stream_class, event_class = stream_classes(order, gpu.saw_host_wait)
    # The class stores the stream: a second device in a process would get the first one's.
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

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=order.unlock)
    yield cuda, "synchronize", synchronize
    yield cuda, "Stream", stream_class
    yield cuda, "Event", event_class
    yield cuda, "current_stream", lambda device=None: stream_class(lane=order.stream)
    yield cuda, "default_stream", lambda device=None: stream_class(lane=order.process.default)
    yield cuda, "stream", lambda stream: order.on_stream(None if stream is None else stream.lane)
    yield cuda, "cudart", constant(runtime)
    yield Tensor, "record_stream", lambda self, stream: order.record_stream(self, stream.lane)


def _gpu_attention(
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
    """Call the attention kernel of a GPU. A CPU build of PyTorch would not choose a kernel."""
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    flash = attn_mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and not flash:  # other kernels do not support grouped queries
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
    """CUDA IPC: memory of the device that one process exports and another process opens.

    An export is kept until it is opened: on a GPU, memory that is never opened is never freed. The
    device has index 0 in every process. An export contains another index, because indices are only
    valid within a process.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._count = 0
        self._unopened: dict[int, tuple[Tensor, Process]] = {}

    def reduce(self, tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Substitute for `reduce_tensor` of `torch.multiprocessing.reductions`, of any shape."""
        if not tensor.is_cuda:
            raise DryDeviceError(f"a tensor on {tensor.device} cannot be exported. Move it to cuda")
        self._count += 1
        self._unopened[self._count] = tensor.detach(), self._order.process
        values = {"storage_device": _EXPORTED_DEVICE, "storage_handle": self._count}
        return self.open, tuple(values.get(name) for name in _PARAMETERS)

    def open(self, *arguments: Any) -> Tensor:
        """Substitute for `rebuild_cuda_tensor` of `torch.multiprocessing.reductions`."""
        values = dict(zip(_PARAMETERS, arguments, strict=True))
        if values["storage_device"] != 0:
            raise DryDeviceError(f"this process has only device 0, not {values['storage_device']}")
        tensor, exporter = self._unopened.pop(values["storage_handle"])
        # The exporter's host has sent the handle to this host.
        self._order.process.host.wait_for(exporter.host.moment())
        return tensor


class RememberedKernel:
    """A function that `torch.compile` turns into one kernel, run once for arguments of a shape.

    The shape of the result depends only on the shapes of the arguments, and the dry device only
    needs shapes. Later calls with the same shapes therefore only allocate. The function is run if
    gradients are recorded, if all values are known, or if the result is a view.
    """

    def __init__(self, function: Callable[..., Any], values: KnownValues) -> None:
        self._function, self._known = function, values
        # shape, stride, dtype and device of the result
        self._results: dict[Hashable, tuple[Any, Any, torch.dtype, torch.device]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return an output of the right shape."""
        operands = tensors_in((args, kwargs))
        if (
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
        ) or not any(self._known.of(tensor) is None for tensor in operands):
            return self._function(*args, **kwargs)
        key = (tuple(map(_shape_key, args)), tuple((k, _shape_key(kwargs[k])) for k in kwargs))
        if key in self._results:
            shape, stride, dtype, device = self._results[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        result = self._function(*args, **kwargs)
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if all(tensor.untyped_storage()._cdata != storage._cdata for tensor in operands):
                shape = tuple(result.shape)
                self._results[key] = shape, result.stride(), result.dtype, result.device
        return result


def _shape_key(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    return argument if isinstance(argument, Hashable) else repr(argument)
