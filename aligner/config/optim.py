"""Optimizer and learning-rate schedule of one role; NeMo's names."""

from dataclasses import dataclass, field
from typing import Literal

from aligner.config.fields import Count, Fraction, Natural, NonNegative, Positive


@dataclass(frozen=True)
class SchedConfig:
    """Learning-rate schedule, counted in optimizer steps.

    constant: warm up, then ``lr``. linear: warm up, then a straight line to ``min_lr``.
    cosine: warm up, half a cosine to ``min_lr``, then ``constant_steps`` at ``min_lr``.
    """

    name: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Natural = 0  # steps of linear rise from 0 to lr
    constant_steps: Natural = 0  # cosine only: steps held at min_lr at the end
    min_lr: NonNegative = 0.0  # cosine and linear only: where the decay ends
    max_steps: Count | None = None  # null: the run's own number of optimizer steps


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer of one role."""

    name: Literal["adam", "sgd"] = "adam"  # adam is AdamW (decoupled weight decay)
    lr: Positive = 1e-6
    weight_decay: NonNegative = 0.0  # of matrices; biases and norms have none
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)  # adam only
    eps: Positive = 1e-8  # adam only
    sched: SchedConfig = field(default_factory=SchedConfig)
