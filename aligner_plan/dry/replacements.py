"""Replacements of calls that the dry device cannot make, with a GPU and without one.

These calls need another process, read values without an operation, or move tensors in a way that
fake tensors do not support.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
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
from aligner.models.gpt.layers import elementwise, short_attention, sigmoid_router
from aligner.models.gpt.megatron import model as megatron
from aligner_plan.dry.files import address
from aligner_plan.dry.known import KnownValues
from aligner_plan.dry.operations import Operations

Replacement = tuple[Any, str, Any]  # object, name of its attribute, new value


def common_replacements(
    operations: Operations, resized: Callable[[torch.UntypedStorage], None]
) -> Iterator[Replacement]:
    """Replace calls that are the same with a GPU and without one.

    ``resized``: called with a storage after its size has changed.
    """
    yield from _host_calls(operations)
    yield from _empty_caches()
    # Models and storages.
    yield nn.Module, "_apply", _apply
    yield accelerate, "init_empty_weights", _init_empty_weights
    real_resize = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        result = real_resize(self, size)
        resized(self)
        return result

    yield torch.UntypedStorage, "resize_", resize
    # Communication.
    real_new_group = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return real_new_group(*args, **{**kwargs, "backend": "fake"})

    # Coalesced collectives are counted individually.
    work = SimpleNamespace(wait=constant(True), append=constant(None))
    for module in (dist, dist.distributed_c10d):
        yield module, "new_group", new_group
        yield module, "all_gather_object", _all_gather_object
        yield module, "gather_object", constant(None)
        yield module, "broadcast_object_list", constant(None)
        yield module, "_coalescing_manager", constant(contextlib.nullcontext(work))
    # Other pipeline stages receive the metrics of the last one.
    metrics = {"loss": 1.0, "valid_tokens": 1.0}
    yield megatron, "broadcast_floats", lambda values, *_: dict(values or metrics)
    yield from _Stages().replacements()
    # Values that depend on weights.
    routing = router.topk_routing_with_score_function
    yield router, "topk_routing_with_score_function", _balanced(routing)
    yield sigmoid_router, "sigmoid_routing", _balanced(sigmoid_router.sigmoid_routing)


def _empty_caches() -> Iterator[Replacement]:
    """Replace functions that cache tensors, because cached tensors belong to another device."""
    for module in (elementwise, short_attention):
        for name, function in list(vars(module).items()):
            if hasattr(function, "cache_parameters"):
                size = function.cache_parameters()["maxsize"]
                yield module, name, functools.lru_cache(size)(function.__wrapped__)


def _host_calls(operations: Operations) -> Iterator[Replacement]:
    """Replace methods of tensors that read values without a visible operation."""
    real_getitem, real_tensor = Tensor.__getitem__, torch.tensor

    def getitem(self: Tensor, index: Any) -> Any:
        # The host reads a scalar index to select an element.
        is_scalar = isinstance(index, FakeTensor) and index.dim() == 0
        if is_scalar and index.dtype is not torch.bool:
            index = operations.read(index)
        return real_getitem(self, index)

    def read_scalar(leaf: Any) -> Any:
        return operations.read(leaf) if isinstance(leaf, FakeTensor) else leaf

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        return real_tensor(tree_map(read_scalar, data), *args, **kwargs)

    yield torch, "tensor", tensor
    yield Tensor, "__getitem__", getitem
    yield FakeTensor, "numpy", lambda self: operations.array(self)
    yield FakeTensor, "data_ptr", address
    # The `tolist` of fake tensors reads element by element.
    yield FakeTensor, "tolist", lambda self: operations.read_all(self)


def constant(result: Any) -> Callable[..., Any]:
    """Return a function that always returns ``result``."""
    return lambda *_, **__: result


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Run `nn.Module._apply` with new parameters, because fake tensors cannot be swapped."""
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
def _init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Substitute for `accelerate.init_empty_weights`, which cannot recreate fake parameters."""
    assert not include_buffers
    real_register = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        real_register(self, name, parameter)
        if parameter is not None:
            with _disable_current_modes():
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                self._parameters[name] = nn.Parameter(data, parameter.requires_grad)

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield


def _all_gather_object(objects: list[Any], local: Any, group: Any = None) -> None:
    objects[:] = [local] * len(objects)


def _balanced(real: Callable[..., Any]) -> Callable[..., Any]:
    """Give every expert the same number of tokens: the router's choice depends on its weights."""

    def route(logits: Tensor, topk: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probabilities, chosen = real(logits, topk, *args, **kwargs)
        with _disable_current_modes():
            first = torch.arange(chosen.shape[0])[:, None] * topk
            experts = (first + torch.arange(topk)) % chosen.shape[1]
            balanced = torch.zeros(chosen.shape, dtype=torch.bool).scatter_(1, experts, True)
        KnownValues().set(chosen, balanced)
        return probabilities, chosen

    return route


class _Stages:
    """Shapes of messages between pipeline stages, which the messages do not contain.

    Hidden states arrive in the order of the schedule's micro-batches. A gradient has the shape of
    the hidden states that were sent, in the same order.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[int, ...]] = []
        self._sent: list[tuple[int, ...]] = []
        self._incoming: tuple[Any, Any] = (None, None)

    def replacements(self) -> Iterator[Replacement]:
        schedules = pipeline.get_forward_backward_func
        yield pipeline, "get_forward_backward_func", self._choose(schedules)
        yield P2PCommunicator, "_communicate", self._communicate(P2PCommunicator._communicate)
        yield P2PCommunicator, "_communicate_shapes", lambda *_: self._incoming

    def _choose(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*, data_iterator: Iterator[Any], model: Any, **options: Any) -> Any:
            microbatches = list(data_iterator)
            config = unwrap_model(model[0]).config
            parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
            shapes = [microbatch.layout.input_ids.shape for microbatch in microbatches]
            self._hidden = [(length // parts, rows, config.hidden_size) for rows, length in shapes]
            self._sent = []  # forward passes alone send hidden states and get no gradients
            return real()(data_iterator=iter(microbatches), model=model, **options)

        return lambda: schedule

    def _communicate(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(communicator: Any, **kwargs: Any) -> Any:
            if kwargs["tensor_send_next"] is not None:
                self._sent.append(tuple(kwargs["tensor_send_next"].shape))
            self._incoming = (
                self._hidden.pop(0) if kwargs["recv_prev"] else None,
                self._sent.pop(0) if kwargs["recv_next"] else None,
            )
            return real(communicator, **kwargs)

        return communicate
