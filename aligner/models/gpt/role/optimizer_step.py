"""Optimizer of a role: learning rate, result and state of a step, whichever the backend."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aligner.checkpoint.background import CopyMemory
from aligner.config import OptimConfig, SchedConfig
from aligner.device import accelerator


def learning_rate(step: int, peak: float, sched: SchedConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step ``step`` (0-based).

    Warm-up rises as ``peak * (step + 1) / (warmup_steps + 1)``. cosine then falls by half a cosine
    to ``min_lr`` and stays there for the last ``constant_steps``; linear falls in a straight line.
    """
    if step < sched.warmup_steps:
        return peak * (step + 1) / (sched.warmup_steps + 1)
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
    """An optimizer with its learning-rate schedule, whose state can wait in host memory."""

    def __init__(
        self, config: OptimConfig, *, gradient_clip_val: float, total_steps: int | None
    ) -> None:
        self.config = config
        self.gradient_clip_val = gradient_clip_val
        self.total_steps = total_steps
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
        """Update the weights, unless the loss or the gradient norm is NaN or infinite.

        A skipped step leaves weights, moments and the schedule as they were.
        """

    @abstractmethod
    def moment_states(self) -> Iterator[dict[str, Any]]:
        """Optimizer state of each tensor that is updated."""

    def offload(self) -> None:
        """Move the Adam moments to host memory (nothing moves where they are there already)."""
        places = [place for place in self._moments() if accelerator.is_apart(place[0][place[1]])]
        copies = self._host_memory.copies([state[key] for state, key in places])
        accelerator.synchronize()
        for (state, key), copy in zip(places, copies, strict=True):
            state[key] = copy
        accelerator.release_memory()
        self._offloaded = True

    def park_gradients(self) -> None:  # noqa: B027 - nothing where a step frees them
        """Free the gradient buffers, where there are any between steps."""

    def park(self) -> None:
        """Have nothing of its own on the device: `park_gradients` and `offload`."""
        self.park_gradients()
        self.offload()

    def restore(self) -> None:
        """Bring everything back to the device."""
        if self._offloaded:
            for state, key in self._moments():
                state[key] = accelerator.to_device(state[key])
            accelerator.synchronize()  # the copies' memory may be freed, or taken for others
            self._offloaded = False

    def resume_at(self, steps: int) -> None:
        """Continue the schedule after ``steps`` updates; moments are on the device."""
        self.steps = steps
        self._offloaded = False

    def _moments(self) -> list[tuple[dict[str, Any], str]]:
        """Each moment's place: a state and its key there."""
        return [
            (state, key)
            for state in self.moment_states()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() > 0
        ]


@dataclass(frozen=True)
class OwnedSlice:
    """The elements of a parameter that this process updates: all, or a run of them."""

    parameter: nn.Parameter
    start: int  # of the first in the flattened parameter
    main: Tensor  # float32 weights that are updated; [n], flat, where they are a run
    inner: torch.optim.Optimizer | None  # keeps the moments; None: the role does not learn

    def moments(self) -> dict[str, Tensor]:
        """Optimizer state that is shaped like ``main``; empty before the first update."""
        state = {} if self.inner is None else self.inner.state.get(self.main, {})
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == self.main.shape and name != "step"
        }

    def set_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Put copies of ``moments`` in place, as they are after ``steps`` updates.

        ``moments``: float tensors of the shape of ``main``, [n] or that of the parameter.
        """
        assert self.inner is not None
        self.inner.state.pop(self.main, None)
        if not moments:
            return
        state = {name: value.to(self.main.device, copy=True) for name, value in moments.items()}
        group = self.inner.param_groups[0]
        if isinstance(self.inner, torch.optim.Adam):  # counts per parameter, others per group
            on_device = group["fused"] or group["capturable"]
            device = self.main.device if on_device else torch.device("cpu")
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)
        else:
            for group in self.inner.param_groups:
                group["step"] = steps
        self.inner.state[self.main] = state
