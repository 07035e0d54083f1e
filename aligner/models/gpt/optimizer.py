"""megatron-core's optimizer with a learning-rate schedule, a finite check and state offload."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from aligner.config import OptimConfig, SchedConfig
from aligner.distributed import accelerator


def wrap_for_training(gpt: GPTModel, data_parallel_size: int) -> DistributedDataParallel:
    """megatron-core's data parallelism: one float32 gradient buffer, summed over ranks.

    The summed gradient is the gradient of the global loss, because losses are divided by global
    counts (``calculate_per_token_loss`` in the transformer config).
    """
    wrapped = DistributedDataParallel(
        gpt.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=data_parallel_size > 1,
        ),
        gpt,
    )
    gpt.config.no_sync_func = wrapped.no_sync
    gpt.config.finalize_model_grads_func = _finalize_gradients
    return wrapped


def _finalize_gradients(model: list[nn.Module], num_tokens: Tensor | None, **groups: Any) -> None:
    """Sum over ranks what is partial on each; the schedule's token count stays out of it."""
    del num_tokens
    with accelerator.cuda_literals():
        finalize_model_grads(model, None, **groups)


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
    """What one optimizer step did. ``grad_norm`` is the norm before clipping."""

    grad_norm: float
    lr: float
    skipped: bool


class RoleOptimizer:
    """The optimizer of one role.

    A step: copy gradients, take their global norm, refuse what is not finite, clip, update.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: OptimConfig,
        *,
        gradient_clip_val: float,
        total_steps: int | None,
    ) -> None:
        self.model = model
        self.config = config
        self.gradient_clip_val = gradient_clip_val
        self.total_steps = total_steps
        self.steps = 0
        self._offloaded = False
        with accelerator.cuda_literals():
            self.inner = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer=config.name,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.betas[0],
                    adam_beta2=config.betas[1],
                    adam_eps=config.eps,
                    sgd_momentum=0.0,
                    bf16=model.config.bf16,
                    params_dtype=model.config.params_dtype,
                    clip_grad=gradient_clip_val,
                    use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
                ),
                [model],
                use_gloo_process_groups=False,
            )
        for group in self.inner.param_groups:
            if "foreach" in group and not accelerator.has_gpu():
                # torch's AdamW walks the parameters one operation at a time on CPU unless fused.
                group.update(foreach=False, fused=True)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.steps, self.config.lr, self.config.sched, self.total_steps)

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        self.model.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self, loss_is_finite: bool = True) -> StepOutcome:
        """Update the weights, unless the loss or the gradient norm is NaN or infinite.

        A skipped step leaves weights, moments and the schedule as they were.
        """
        lr = self.lr
        with accelerator.cuda_literals():
            overflow = self.inner.prepare_grads()
            norm = float(self.inner.get_grad_norm())
            if overflow or not loss_is_finite or not math.isfinite(norm):
                return StepOutcome(grad_norm=norm, lr=lr, skipped=True)
            for group in self.inner.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
            if self.gradient_clip_val > 0:
                for part in self.inner.chained_optimizers:
                    clip_grad_by_total_norm_fp32(
                        part.get_parameters(), self.gradient_clip_val, norm
                    )
            self.inner.step_with_ready_grads()
        self.steps += 1
        return StepOutcome(grad_norm=norm, lr=lr, skipped=False)

    def offload(self) -> None:
        """Move the Adam moments to host memory (nothing moves where they are there already)."""
        self._move(accelerator.to_host)
        accelerator.synchronize()
        accelerator.release_memory()
        self._offloaded = True

    def restore(self) -> None:
        """Bring the Adam moments back to the device."""
        if self._offloaded:
            self._move(accelerator.to_device)
            self._offloaded = False

    def _move(self, move: Any) -> None:
        for part in self.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        state[key] = move(value)

    def state_dict(self) -> dict[str, Any]:
        """Moments, main weights (bf16) and step count."""
        with accelerator.cuda_literals():
            return {"steps": self.steps, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`; the weights are loaded separately and first."""
        with accelerator.cuda_literals():
            self.inner.load_state_dict(state["inner"])
        self.steps = int(state["steps"])
