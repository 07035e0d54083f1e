"""Optimizer and learning-rate schedule of one role; NeMo's names."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from aligner.config.fields import Aliases, Beta, Count, Natural, NonNegative, Positive

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

    # CosineAnnealing, NeMo's name, is cosine.
    name: Annotated[
        Literal["constant", "cosine", "linear"], Aliases((("CosineAnnealing", "cosine"),))
    ] = "constant"
    warmup_steps: Natural = 0  # steps of linear rise from 0 to lr
    constant_steps: Natural = 0  # cosine only: steps held at min_lr at the end
    min_lr: NonNegative = 0.0  # cosine and linear only: where the decay ends
    max_steps: Count | None = None  # null: the run's own number of optimizer steps


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer of one role."""

    # adam is AdamW (decoupled weight decay), and so are NeMo's distributed_fused_adam,
    # mcore_distributed_optim, fused_adam, megatron_fused_adam and adamw.
    name: Annotated[
        Literal["adam", "sgd"], Aliases(tuple((name, "adam") for name in _ADAM_OF_NEMO))
    ] = "adam"
    lr: Positive = 1e-6
    weight_decay: NonNegative = 0.0  # of matrices; biases and norms have none
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # adam only
    eps: Positive = 1e-8  # adam only
    sched: SchedConfig = field(default_factory=SchedConfig)
