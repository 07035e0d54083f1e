"""Optimizer of a sharded transformers model. Updates are those of megatron-core's optimizer."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aligner.device import accelerator
from aligner.models.gpt.dtensor.shards import ParameterShard
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import OwnedSlice, StepOptimizer, StepOutcome
from aligner.parallel.groups import ParallelState


class ShardOptimizer(StepOptimizer):
    """AdamW or SGD on this process's shards, with clipping and a learning-rate schedule."""

    def __init__(
        self, shards: Sequence[ParameterShard], parallel: ParallelState, settings: RoleSettings
    ) -> None:
        super().__init__(settings)
        config = self.config
        self._parallel = parallel
        self._shards = list(shards)
        # Plain tensors in the parameters' memory, so that torch's optimizer sees no DTensors.
        self._mains = {
            shard.name: nn.Parameter(shard.local, requires_grad=False)
            for shard in self._shards
            if shard.local.numel() > 0
        }
        # Weight decay applies to matrices, not to vectors, as in megatron-core.
        local = [shard for shard in self._shards if shard.name in self._mains]
        groups: list[dict[str, Any]] = [
            {
                "params": [self._mains[s.name] for s in local if (len(s.shape) > 1) == is_matrix],
                "weight_decay": config.weight_decay if is_matrix else 0.0,
            }
            for is_matrix in (True, False)
        ]
        self._inner: torch.optim.Optimizer
        if config.name == "sgd":
            self._inner = torch.optim.SGD(groups, lr=config.lr)
        else:
            self._inner = torch.optim.AdamW(
                groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
            )

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for shard in self._shards:
            shard.parameter.grad = None
        for main in self._mains.values():
            main.grad = None

    @torch.no_grad()
    def step(self, loss_is_finite: bool = True) -> StepOutcome:
        """See `StepOptimizer.step`."""
        # A step that is not finite changes no state.
        lr, gradients = self.lr, self._take_gradients()
        norm = self._norm(gradients)
        if not loss_is_finite or not math.isfinite(norm):
            return StepOutcome(grad_norm=norm, lr=lr, skipped=True)
        # Clip by the global norm, then update.
        clip = self.gradient_clip_val / (norm + 1e-6) if self.gradient_clip_val > 0 else 1.0
        if clip < 1.0 and gradients:
            torch._foreach_mul_(list(gradients.values()), clip)
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()
        self.steps += 1
        return StepOutcome(grad_norm=norm, lr=lr, skipped=False)

    def _take_gradients(self) -> dict[str, Tensor]:
        """Return the local gradients by name, and pass them to torch's optimizer."""
        gradients = {}
        for shard in self._shards:
            gradient = shard.gradient
            if gradient is None:  # no output depends on the weight
                continue
            if shard.summed:  # a collective, which ranks without elements must call too
                dist.all_reduce(gradient, group=self._parallel.tp_group)
            if shard.name in self._mains:
                gradients[shard.name] = self._mains[shard.name].grad = gradient
        return gradients

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """Compute the Euclidean norm of the whole model's gradient. Every weight counts once."""
        # Replicated parameters count on one tensor-parallel rank only.
        is_first = self._parallel.tp_rank == 0
        squares = [
            torch.linalg.vector_norm(gradients[shard.name]).double().square()
            for shard in self._shards
            if shard.name in gradients and (is_first or shard.split_dim is not None)
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = accelerator.to_device(total)
        for group in (self._parallel.dp_group, self._parallel.tp_group):
            dist.all_reduce(total, group=group)
        square = total.item()
        return math.sqrt(square) if square >= 0 else math.nan

    def moment_states(self) -> Iterator[dict[str, Any]]:
        """See `StepOptimizer.moment_states`."""
        yield from self._inner.state.values()

    # Run state --------------------------------------------------------------------------------

    def owned_slices(self) -> Iterator[tuple[ParameterShard, OwnedSlice]]:
        """Yield each shard that has elements on this process, and the elements it updates."""
        for shard in self._shards:
            if shard.name in self._mains:
                main = self._mains[shard.name]
                yield shard, OwnedSlice(shard.parameter, 0, main, self._inner)
