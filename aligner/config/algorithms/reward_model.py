"""Data that a reward model learns from, and the loop that trains it."""

from dataclasses import dataclass, field
from typing import Literal

from aligner.config.algorithms.preference import PairDataConfig
from aligner.config.algorithms.trainer import SupervisedLoopConfig, TrainingConfig
from aligner.config.fields import Count


@dataclass(frozen=True)
class RewardDataConfig(PairDataConfig):
    """Comparisons, or for regression rows that hold one response and its ratings."""

    response_column: str = "response"  # regression: text
    # regression: columns of ratings, a number or null each; the head rates them in this order.
    attribute_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainerRewardModelConfig(SupervisedLoopConfig):
    """The loop; a step is one optimizer update."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"  # from comparisons, from ratings
    # bradley_terry, with the strength s of the preference and the difference d of the rewards.
    # plain: -log sigmoid(d); margin: -log sigmoid(d - s); scaled: -s log sigmoid(d).
    variant: Literal["plain", "margin", "scaled"] = "plain"
    # bradley_terry: where mean and deviation of the trained model's rewards are measured, which it
    # then standardises by; null: nowhere.
    standardize_on: Literal["train", "validation"] | None = None
    limit_standardize_examples: Count = 1024  # the first so many pairs


@dataclass(frozen=True)
class RewardTrainerConfig(TrainingConfig):
    """The trainer of a reward model."""

    reward_model: TrainerRewardModelConfig = field(default_factory=TrainerRewardModelConfig)
