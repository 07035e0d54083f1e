"""Optimizer and learning-rate schedule of one role, with NeMo's names."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from aligner.config.fields import Beta, Count, Natural, NonNegative, Positive, aliases

# NeMo's names for AdamW of megatron-core, whose state is sharded over ranks.
_ADAM_OF_NEMO = (
    *("adamw", "fused_adam", "megatron_fused_adam", "distributed_fused_adam"),
    "mcore_distributed_optim",
)


@dataclass(frozen=True)
class SchedConfig:
    """Learning-rate schedule, counted in optimizer steps."""

    name: Annotated[
        Literal["constant", "cosine", "linear"], aliases({"CosineAnnealing": "cosine"})
    ] = "constant"
    """Shape of the schedule, counted in optimizer updates. `constant`: warm up, then `lr`.
    `linear`: warm up, then a straight line to `min_lr`. `cosine` (NeMo's `CosineAnnealing`): warm
    up, half a cosine to `min_lr`, then `constant_steps` there."""

    warmup_steps: Natural = 0
    """Number of updates in which the rate rises linearly from 0 to `lr`."""

    constant_steps: Natural = 0
    """`cosine`: number of updates at `min_lr` at the end."""

    min_lr: NonNegative = 0.0
    """Learning rate at the end of `cosine` and `linear`."""

    max_steps: Count | None = None
    """Length of the schedule in updates. `null` means all updates of the run."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer of the policy or the critic."""

    name: Annotated[Literal["adam", "sgd"], aliases(dict.fromkeys(_ADAM_OF_NEMO, "adam"))] = "adam"
    """`adam` (AdamW, decoupled weight decay) or `sgd`. NeMo's names for AdamW mean `adam`. The
    options `optim@model.optim=sgd` and `optim@critic.optim=sgd` set the defaults for `sgd`."""

    lr: Positive = 1e-6
    """Peak learning rate."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices. Biases and norms are not decayed."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """`adam`: decay rates of the first and second moment."""

    eps: Positive = 1e-8
    """`adam`: constant added to the root of the second moment."""

    sched: SchedConfig = field(default_factory=SchedConfig)
