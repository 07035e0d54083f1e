"""Optimizer steps, learning-rate schedule, and offload of training state to host memory.

Storages are offloaded, not tensors, because a parameter, its shard in the distributed optimizer and
a tied copy are views of one storage. They remain views of this storage.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.checkpoint.background import CopyMemory
from aligner.checkpoint.run_state.tree import storage_bytes
from aligner.config import SchedConfig
from aligner.device import accelerator
from aligner.models.gpt.role.settings import RoleSettings


def learning_rate(step: int, peak: float, sched: SchedConfig, total_steps: int | None) -> float:
    """Compute the learning rate of optimizer step ``step`` (0-based).

    In the warm-up it is ``peak * (step + 1) / (warmup_steps + 1)``. ``cosine`` then falls along
    half a cosine to ``min_lr``, which the last ``constant_steps`` use. ``linear`` falls linearly.
    """
    if step < sched.warmup_steps:
        return peak * (step + 1) / (sched.warmup_steps + 1)
    # After the warm-up, without a known end the rate is constant.
    total = sched.max_steps or total_steps
    if sched.name == "constant" or total is None:
        return peak
    constant = sched.constant_steps if sched.name == "cosine" else 0
    span = max(1, total - sched.warmup_steps - constant)
    progress = min(1.0, (step - sched.warmup_steps) / span)
    share = (1 + math.cos(math.pi * progress)) / 2 if sched.name == "cosine" else 1 - progress
    return sched.min_lr + (peak - sched.min_lr) * share


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one optimizer step. ``grad_norm`` is the norm before clipping."""

    grad_norm: float
    lr: float
    skipped: bool


class StepOptimizer(ABC):
    """An optimizer with a learning-rate schedule and state that can be offloaded to the host."""

    def __init__(self, settings: RoleSettings) -> None:
        assert settings.optim is not None
        self.config, self.total_steps = settings.optim, settings.max_optimizer_steps
        self.gradient_clip_val = settings.gradient_clip_val
        self.steps = 0
        self._offloaded = False
        self._host_memory = CopyMemory()

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.steps, self.config.lr, self.config.sched, self.total_steps)

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear the gradients."""

    @abstractmethod
    def step(self, loss_is_finite: bool = True) -> StepOutcome:
        """Update the weights. A loss or gradient norm that is not finite changes nothing."""

    def collect_weights(self) -> None:  # noqa: B027 - no effect if a step gathers them
        """Gather the weights that other ranks updated. All data-parallel ranks must call it."""

    @abstractmethod
    def moment_states(self) -> Iterator[dict[str, Any]]:
        """Yield torch's optimizer state of each updated tensor, a dict of tensors by name."""

    def offload(self) -> None:
        """Move the Adam moments from the device to host memory."""
        on_device = [(s, key) for s, key in self._moments() if accelerator.is_apart(s[key])]
        copies = self._host_memory.copies([state[key] for state, key in on_device])
        accelerator.synchronize()
        for (state, key), copy in zip(on_device, copies, strict=True):
            state[key] = copy
        accelerator.release_memory()
        self._offloaded = True

    def park_gradients(self) -> None:  # noqa: B027 - no effect if a step frees them
        """Free the buffers that keep gradients between steps, if any."""

    def park(self) -> None:
        """Free all device memory of the optimizer: `park_gradients` and `offload`."""
        self.park_gradients()
        self.offload()

    def restore(self) -> None:
        """Move the optimizer state back to the device."""
        if self._offloaded:
            for state, key in self._moments():
                state[key] = accelerator.to_device(state[key])
            accelerator.synchronize()  # the copies' memory may now be freed or reused
            self._offloaded = False

    def resume_at(self, steps: int) -> None:
        """Record that ``steps`` updates were made and that the moments are on the device."""
        self.steps = steps
        self._offloaded = False

    def _moments(self) -> list[tuple[dict[str, Any], str]]:
        return [
            (state, key)
            for state in self.moment_states()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() > 0
        ]


@dataclass(frozen=True)
class OwnedSlice:
    """Elements of a parameter that this process updates, all of them or a contiguous range."""

    parameter: nn.Parameter
    start: int  # index of the first element in the flattened parameter
    main: Tensor  # updated float32 weights, flat [n] if they are a range
    inner: torch.optim.Optimizer | None  # contains the moments. None for a frozen role

    def moments(self) -> dict[str, Tensor]:
        """Return Adam's moments by name, in ``main``'s shape. Empty before the first update."""
        state = {} if self.inner is None else self.inner.state.get(self.main, {})
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == self.main.shape and name != "step"
        }

    def set_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Set the optimizer state to copies of ``moments``, [n] each, and to ``steps`` updates."""
        assert self.inner is not None
        self.inner.state.pop(self.main, None)
        if not moments:
            return
        state = {name: value.to(self.main.device, copy=True) for name, value in moments.items()}
        # torch's optimizers store the count of steps in different ways.
        group = self.inner.param_groups[0]
        if isinstance(self.inner, torch.optim.Adam):  # counts steps per parameter, not per group
            on_device = group["fused"] or group["capturable"]
            device = self.main.device if on_device else torch.device("cpu")
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)
        else:
            for group in self.inner.param_groups:
                group["step"] = steps
        self.inner.state[self.main] = state


class _Parked(NamedTuple):
    """A storage whose device memory is freed, and its content."""

    storage: torch.UntypedStorage
    device: torch.device
    size: int  # bytes
    copy: Tensor | None  # content, uint8, or None to restore zeros


class ModelOffload:
    """Moves weights and gradients of one model between device and host memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parked: list[_Parked] = []
        self._memory = CopyMemory()

    def to_host(self, *, params: bool, grads: bool) -> None:
        """Move the weights (``params``) to host memory, and free the gradients (``grads``)."""
        weights = [
            value.to_local() if isinstance(value, DTensor) else value
            for value in (parameter.data for parameter in self._model.parameters())
        ]
        buffers = [
            parameter.main_grad
            for parameter in self._model.parameters()
            if hasattr(parameter, "main_grad")
        ]
        self.park(copied=weights if params else [], freed=buffers if grads else [])

    def park(self, *, copied: Iterable[Tensor], freed: Iterable[Tensor]) -> None:
        """Free memory of tensors [...]. `to_device` restores ``copied`` and zeros ``freed``."""
        # Copy before any storage is freed, because tensors can share a storage.
        storages = _storages(copied)
        copies = self._memory.copies([storage_bytes(*storage) for storage in storages])
        parked = [
            _Parked(*storage, copy.numel(), copy)
            for storage, copy in zip(storages, copies, strict=True)
        ]
        parked += [_Parked(*storage, storage[0].nbytes(), None) for storage in _storages(freed)]
        accelerator.synchronize()  # the copies are asynchronous
        for storage, *_ in parked:
            storage.resize_(0)
        self._parked += parked
        accelerator.release_memory()

    def to_device(self) -> None:
        """Restore the device memory that `park` freed."""
        for storage, device, size, copy in self._parked:
            storage.resize_(size)
            content = storage_bytes(storage, device)
            if copy is None:
                content.zero_()
            else:
                content.copy_(copy, non_blocking=True)
        if self._parked:
            accelerator.synchronize()  # the copies must not be freed before they are read
        self._parked = []


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, torch.device]]:
    storages = {
        tensor.untyped_storage()._cdata: (tensor.untyped_storage(), tensor.device)
        for tensor in tensors
        if accelerator.is_apart(tensor) and tensor.untyped_storage().nbytes()
    }
    return list(storages.values())


class SwappedWeights:
    """Second values of parameters, in host memory. Initially they are copies of the parameters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy ``parameters``, tensors of any shape and float dtype by their names."""
        self._parameters = list(parameters.values())
        self._copies = CopyMemory().copies([value.detach() for value in self._parameters])
        accelerator.synchronize()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the parameters' values with those in host memory."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            current = parameter.clone()
            parameter.copy_(copy, non_blocking=True)
            copy.copy_(current, non_blocking=True)
        accelerator.synchronize()  # the host may read or free its memory

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the parameters' values with the stored values until the block ends."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()
