"""Data that a reward model learns from, and the loop that trains it."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import StrictStr

from aligner.config.algorithms.preference import PairDataConfig
from aligner.config.algorithms.trainer import SupervisedLoopConfig, TrainingConfig
from aligner.config.fields import Count


@dataclass(frozen=True)
class RewardDataConfig(PairDataConfig):
    """Comparisons, or for regression rows that hold one response and its ratings."""

    response_column: StrictStr = "response"
    """`regression`: column of the response that is rated."""

    attribute_columns: tuple[StrictStr, ...] = ()
    """`regression`: columns of ratings, a number or null each.

    The head has an output for each, in this order.
    """


@dataclass(frozen=True)
class TrainerRewardModelConfig(SupervisedLoopConfig):
    """The loop; a step is one optimizer update."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """From comparisons, `bradley_terry`, or from ratings, `regression`."""

    variant: Literal["plain", "margin", "scaled"] = "plain"
    """Use of the strength s of a preference, by `bradley_terry`.

    With the difference d of the rewards: `plain`: -log sigmoid(d); `margin`: -log sigmoid(d - s);
    `scaled`: -s log sigmoid(d).
    """

    standardize_on: Literal["train", "validation"] | None = None
    """Data on which the trained model's rewards are measured.

    `bradley_terry`: mean and deviation on `train` or `validation`, and the model then standardises
    by them; null: it does not.
    """

    limit_standardize_examples: Count = 1024
    """Pairs there that are measured, the first so many."""


@dataclass(frozen=True)
class RewardTrainerConfig(TrainingConfig):
    """The trainer of a reward model."""

    reward_model: TrainerRewardModelConfig = field(default_factory=TrainerRewardModelConfig)
