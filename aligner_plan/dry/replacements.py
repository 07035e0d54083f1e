"""Replacements of calls that the dry device cannot make, with a GPU and without one.

These calls need another process, read values without an operation, or move tensors as fake ones
cannot be.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import router
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from aligner.models.gpt.forward import schedule as pipeline
from aligner.models.gpt.layers import elementwise, short_attention
from aligner.models.gpt.megatron import model as megatron
from aligner_plan.dry.files import address
from aligner_plan.dry.known import KnownValues
from aligner_plan.dry.operations import Operations

Replacement = tuple[Any, str, Any]  # where, by which name, and what is there instead


def common_replacements(
    operations: Operations, resized: Callable[[torch.UntypedStorage], None]
) -> Iterator[Replacement]:
    """Replacements of calls with a GPU and without one.

    ``resized``: called with a storage's new size.
    """
    yield from _host_calls(operations)
    yield from _empty_caches()
    yield nn.Module, "_apply", _apply
    yield accelerate, "init_empty_weights", _without_memory
    yield torch.UntypedStorage, "resize_", _resize(resized)
    for holder in (dist, dist.distributed_c10d):
        yield holder, "new_group", _new_group(dist.new_group)
        yield holder, "all_gather_object", _all_gather_object
        yield holder, "gather_object", answers(None)
        yield holder, "broadcast_object_list", answers(None)
        yield holder, "_coalescing_manager", _coalescing_manager
    yield megatron, "broadcast_floats", _broadcast_floats
    yield (
        router,
        "topk_routing_with_score_function",
        _evenly(router.topk_routing_with_score_function),
    )
    yield from _Stages().replacements()


def _empty_caches() -> Iterator[Replacement]:
    """Functions that remember tensors: those of another device are neither here nor counted."""
    for module in (elementwise, short_attention):
        for name, function in list(vars(module).items()):
            if hasattr(function, "cache_parameters"):
                size = function.cache_parameters()["maxsize"]
                yield module, name, functools.lru_cache(size)(function.__wrapped__)


def _host_calls(operations: Operations) -> Iterator[Replacement]:
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
    yield FakeTensor, "data_ptr", address
    # Fake tensors have a `tolist` of their own, which reads element by element.
    yield FakeTensor, "tolist", lambda own: operations.read_all(own)


def _is_number(index: Any) -> bool:
    """Return whether an index is a tensor that the host reads to know what it selects."""
    return isinstance(index, FakeTensor) and index.dim() == 0 and index.dtype is not torch.bool


def answers(answer: Any) -> Callable[..., Any]:
    """A call that is always answered so."""
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


def _resize(resized: Callable[[torch.UntypedStorage], None]) -> Callable[..., Any]:
    real = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        result = real(self, size)
        resized(self)
        return result

    return resize


def _new_group(real: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "backend": "fake"})

    return new_group


def _all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _broadcast_floats(values: Any, *_: Any) -> dict[str, float]:
    """Metrics of the last pipeline stage, which other stages receive."""
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
    """Shapes of the messages between pipeline stages, which are not sent with them.

    Hidden states are those of the schedule's micro-batches, one after the other. A gradient has the
    shape of what was sent, in the same order.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[int, ...]] = []
        self._sent: list[tuple[int, ...]] = []
        self._coming: tuple[Any, Any] = (None, None)

    def replacements(self) -> Iterator[Replacement]:
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
            self._sent = []  # only forward passes send, and get no gradients
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
