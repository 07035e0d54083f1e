"""The dry device: fake tensors on ``cuda``, fake process groups, and every replaced call.

What a real GPU computes is unknown here, except for what follows from values of the host (`known`).
A value that the host reads and that is unknown is 1.0, 1 or False: a finite loss, no end of a
sequence.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import accelerate
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import router
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from aligner.distributed import accelerator
from aligner.dry.graphs import Capturing, graph_class
from aligner.dry.known import KnownValues, tensors_in
from aligner.dry.operations import Operations
from aligner.dry.record import Kind, Memory, Record, running_place
from aligner.models.gpt import fusions, megatron, pipeline

_aten = torch.ops.aten


DeviceKind = Literal["gpu", "cpu"]
# Type of the tensors that are counted, and what the allocator gives memory in multiples of, bytes.
_MEMORY: dict[DeviceKind, tuple[str, int]] = {"gpu": ("cuda", 512), "cpu": ("cpu", 1)}


class DryDevice(contextlib.AbstractContextManager["DryDevice"]):
    """One GPU among ``world_size``, in the place of process ``rank``.

    Enter it in a process of its own, after `aligner.dry.guard.load_guard` and before megatron-core
    is used. ``memory`` counts what is alive; `record` counts what a block does.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        *,
        memory_bytes: int = 80 << 30,
        kind: DeviceKind = "gpu",
    ) -> None:
        """``kind``: ``cpu`` is a process without a GPU, by the code that it runs."""
        self.kind = kind
        self.world_size = world_size
        self.rank = rank
        self.memory_bytes = memory_bytes
        self.memory = Memory(*_MEMORY[kind])
        self._records: list[Record] = []
        self._inside_kernel = False
        self._operations = Operations(self)
        self._capturing = Capturing()
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
            stack.enter_context(self._operations)
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

    # What operations say (`aligner.dry.operations.Observer`) --------------------------------------

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation."""
        if self._inside_kernel:
            return
        on_device = [each for each in tensors_in(out) if self.memory.holds(each)]
        self._saw_memory(on_device)
        if self._capturing.graph is not None:
            self._capturing.graph.saw(func, args, kwargs, out)
            return
        for record in self._records:
            if on_device or any(map(self.memory.holds, tensors_in((args, kwargs)))):
                record.saw(func, args, kwargs, out)

    def _saw_memory(self, tensors: Sequence[Tensor]) -> None:
        new = [tensor for tensor in tensors if self.memory.saw(tensor)]
        if new and self._records:
            place = running_place()
            for record in self._records:
                record.saw_memory(self.memory, place)

    def _one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that `torch.compile` would make one kernel of."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self._inside_kernel:
                return function(*args, **kwargs)
            self._inside_kernel = True
            try:
                out = function(*args, **kwargs)
            finally:
                self._inside_kernel = False
            operands, results = tensors_in((args, kwargs)), tensors_in(out)
            self._saw_memory(results)
            self._count(lambda record: record.saw_kernel(operands, results))
            return out

        return kernel

    def _count(self, count: Callable[[Record], None]) -> None:
        """Now, or whenever the graph is replayed that is being captured."""
        if self._capturing.graph is not None:
            self._capturing.graph.counts(count)
            return
        for record in self._records:
            count(record)

    @property
    def runs(self) -> bool:
        """Whether operations are run, not captured."""
        return self._capturing.graph is None

    def saw_host_read(self, tensor: Tensor) -> None:
        """Count a wait, where the tensor is on the device."""
        if tensor.is_cuda:
            self._capturing.refuse("the host waits for the device")
        if tensor.is_cuda and self._records:
            place = running_place()
            for record in self._records:
                record.host_waits[place] += 1

    def saw_collective(self, packet: Any, operands: Sequence[Any], ranks: Sequence[int]) -> None:
        """Count a collective, by its larger operand."""
        sizes = (sum(each.nbytes for each in tensors_in(operand)) for operand in operands)
        size = max(sizes, default=0)
        self.memory.wrote(tensors_in(operands[0]))
        name = packet.__name__
        self._count(lambda record: record.saw_collective(name, ranks, size))

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Everything that asks a driver, a process or a kernel that is not there."""
        if self.kind == "gpu":
            yield from self._gpu_replacements()
        yield from _host_calls(self._operations)
        yield nn.Module, "_apply", _apply
        yield accelerate, "init_empty_weights", _without_memory
        yield torch.UntypedStorage, "resize_", _resize(self.memory)
        for holder in (dist, dist.distributed_c10d):
            yield holder, "new_group", _new_group(dist.new_group)
            yield holder, "all_gather_object", _all_gather_object
            yield holder, "gather_object", _answers(None)
            yield holder, "broadcast_object_list", _answers(None)
            yield holder, "_coalescing_manager", _coalescing_manager
        yield megatron, "broadcast_floats", _broadcast_floats
        yield (
            router,
            "topk_routing_with_score_function",
            _evenly(router.topk_routing_with_score_function),
        )
        yield from _Stages().replacements()

    def _gpu_replacements(self) -> Iterator[tuple[Any, str, Any]]:
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
        yield cuda, "CUDAGraph", graph_class(self._records, self._operations.known)
        yield cuda, "graph", self._capturing.into
        yield cuda, "graph_pool_handle", _answers(None)
        for name in ("current_stream", "default_stream", "stream"):
            yield cuda, name, _Stream
        for name in ("range_push", "range_pop"):
            yield cuda.nvtx, name, _answers(None)
        yield megatron_random, "_set_cuda_rng_state", _answers(None)
        yield FakeTensorMode, "avoid_device_init", property(lambda mode: True)
        yield F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)
        yield fusions, "missing_for_kernels", _answers(None)
        for module in (fusions, fused_bias_dropout, fused_bias_swiglu):
            for name, function in list(vars(module).items()):
                if hasattr(function, "_torchdynamo_orig_callable"):
                    whole = function._torchdynamo_orig_callable
                    yield module, name, self._one_kernel(whole)


def _host_calls(operations: Operations) -> Iterator[tuple[Any, str, Any]]:
    """Methods of tensors that read values without an operation that could be seen."""
    getitem = Tensor.__getitem__

    def item(self: Tensor, index: Any) -> Any:
        return getitem(self, operations.read(index) if _is_number(index) else index)

    make = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        return make(tree_map(number, data), *args, **kwargs)  # of single numbers

    def number(each: Any) -> Any:
        return operations.read(each) if isinstance(each, FakeTensor) else each

    yield torch, "tensor", tensor
    yield Tensor, "__getitem__", item
    yield FakeTensor, "numpy", lambda own: operations.array(own)
    # Fake tensors have a `tolist` of their own, which reads element by element.
    yield FakeTensor, "tolist", lambda own: operations.read_all(own)
    yield Tensor, "record_stream", _answers(None)  # memory is freed in the host's order


def _is_number(index: Any) -> bool:
    """Whether an index is a tensor that the host reads to know what it selects."""
    return isinstance(index, FakeTensor) and index.dim() == 0 and index.dtype is not torch.bool


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


class _Stream:
    """A stream, an event, and the context of either: nothing is ever waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

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


@contextlib.contextmanager
def _without_memory(include_buffers: bool = False) -> Iterator[None]:
    """`accelerate.init_empty_weights`, whose way to make parameters fake ones do not have."""
    assert not include_buffers
    real = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        real(self, name, parameter)
        if parameter is not None:
            with _disable_current_modes():
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                self._parameters[name] = nn.Parameter(data, parameter.requires_grad)

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield


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
    return dict(values or {"loss": 1.0, "valid_tokens": 1.0})


def _evenly(real: Callable[..., Any]) -> Callable[..., Any]:
    """Every expert gets as many tokens: which ones a router chooses follows from its weights."""

    def route(logits: Tensor, topk: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probabilities, chosen = real(logits, topk, *args, **kwargs)
        with _disable_current_modes():
            first = torch.arange(chosen.shape[0])[:, None] * topk
            experts = (first + torch.arange(topk)) % chosen.shape[1]
            even = torch.zeros(chosen.shape, dtype=torch.bool).scatter_(1, experts, True)
        KnownValues().set(chosen, even)
        return probabilities, chosen

    return route


class _Stages:
    """Between pipeline stages, where nobody says what shape comes.

    Hidden states are those of the schedule's micro-batches, one after the other. A gradient has the
    shape of what was sent, in the same order.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[int, ...]] = []
        self._sent: list[tuple[int, ...]] = []
        self._coming: tuple[Any, Any] = (None, None)

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        yield (
            pipeline,
            "get_forward_backward_func",
            self._choose(pipeline.get_forward_backward_func),
        )
        yield P2PCommunicator, "_communicate", self._communicate(P2PCommunicator._communicate)
        yield P2PCommunicator, "_communicate_shapes", lambda *_: self._coming

    def _choose(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*, data_iterator: Iterator[Any], model: Any, **options: Any) -> Any:
            microbatches = list(data_iterator)
            config = unwrap_model(model[0]).config
            parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
            shapes = [microbatch.layout.input_ids.shape for microbatch in microbatches]
            self._hidden = [(length // parts, n, config.hidden_size) for n, length in shapes]
            self._sent = []  # forward passes alone send, and get no gradients
            return real()(data_iterator=iter(microbatches), model=model, **options)

        return lambda: schedule

    def _communicate(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(communicator: Any, **kwargs: Any) -> Any:
            if kwargs["tensor_send_next"] is not None:
                self._sent.append(tuple(kwargs["tensor_send_next"].shape))
            self._coming = (
                self._hidden.pop(0) if kwargs["recv_prev"] else None,
                self._sent.pop(0) if kwargs["recv_next"] else None,
            )
            return real(communicator, **kwargs)

        return communicate


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
