"""Optimizer and learning-rate schedule of one role; NeMo's names."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from aligner.config.fields import Beta, Count, Natural, NonNegative, Positive, aliases

# NeMo's optimizers that are this one: AdamW by megatron-core, its state shared out over ranks.
_ADAM_OF_NEMO = (
    "adamw",
    "fused_adam",
    "megatron_fused_adam",
    "distributed_fused_adam",
    "mcore_distributed_optim",
)


@dataclass(frozen=True)
class SchedConfig:
    """Learning-rate schedule, counted in optimizer steps.

    constant: warm up, then ``lr``. linear: warm up, then a straight line to ``min_lr``.
    cosine: warm up, half a cosine to ``min_lr``, then ``constant_steps`` at ``min_lr``.
    """

    name: Annotated[
        Literal["constant", "cosine", "linear"], aliases({"CosineAnnealing": "cosine"})
    ] = "constant"
    """Course of the learning rate, counted in optimizer updates.

    `constant`: warm up, then `lr`. `linear`: warm up, then a straight line to `min_lr`. `cosine`
    (NeMo's `CosineAnnealing`): warm up, half a cosine to `min_lr`, then `constant_steps` there.
    """

    warmup_steps: Natural = 0
    """Updates of linear rise from 0 to `lr`."""

    constant_steps: Natural = 0
    """`cosine`: updates held at `min_lr` at the end."""

    min_lr: NonNegative = 0.0
    """End of the decay of `cosine` and `linear`."""

    max_steps: Count | None = None
    """Updates that the schedule spans. `null` means those of the run."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer of one role."""

    name: Annotated[Literal["adam", "sgd"], aliases(dict.fromkeys(_ADAM_OF_NEMO, "adam"))] = "adam"
    """`adam` (AdamW, decoupled weight decay) or `sgd`.

    NeMo's `distributed_fused_adam`, `mcore_distributed_optim`, `fused_adam`, `megatron_fused_adam`
    and `adamw` are `adam`. The groups `optim@model.optim=sgd` and `optim@critic.optim=sgd` set the
    matching defaults.
    """

    lr: Positive = 1e-6
    """Peak learning rate."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices; biases and norms have none."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moment; `adam` only."""

    eps: Positive = 1e-8
    """Added to the root of the second moment; `adam` only."""

    sched: SchedConfig = field(default_factory=SchedConfig)
