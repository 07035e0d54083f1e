"""Data that a reward model learns from, and the loop that trains it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

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

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse a loss without its data, and options and data of the other loss."""
        data, rates = run.data, self.loss == "regression"
        if run.policy.backend != "megatron":
            yield (
                f"policy.backend={run.policy.backend}: reward models are trained on megatron-core; "
                "set policy.backend=megatron"
            )
        if rates and not data.attribute_columns:
            yield (
                f"{key}.loss=regression rates attributes, and data.attribute_columns is empty; "
                "name the columns of ratings, for example data.attribute_columns=[helpfulness]"
            )
        if rates and self.variant != "plain":
            yield (
                f"{key}.variant={self.variant} is one of bradley_terry, and {key}.loss=regression; "
                "leave it at plain"
            )
        if rates and self.standardize_on is not None:
            yield (
                f"{key}.standardize_on={self.standardize_on}: ratings have a scale of their own, "
                "which regression keeps; set it to null"
            )
        if not rates and data.attribute_columns:
            yield (
                f"data.attribute_columns={list(data.attribute_columns)} are for {key}.loss="
                "regression; set that, or leave them empty"
            )
        if not rates and self.variant != "plain" and data.chosen_reward_column is None:
            yield (
                f"{key}.variant={self.variant} reads how strong a preference is; give "
                "data.chosen_reward_column and data.rejected_reward_column, or set variant=plain"
            )
        if self.standardize_on == "validation" and data.validation is None:
            yield (
                f"{key}.standardize_on=validation, and data.validation is null; give it, or use "
                "train"
            )


@dataclass(frozen=True)
class RewardTrainerConfig(TrainingConfig):
    """The trainer of a reward model."""

    reward_model: TrainerRewardModelConfig = field(default_factory=TrainerRewardModelConfig)
