"""Data and trainer of preference optimisation and of reward models."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.config.algorithms.process import TrainingConfig
from aligner.config.algorithms.trainer import SupervisedLoopConfig
from aligner.config.data import PromptColumns, TrainingSets
from aligner.config.fields import Count, MinorShare, NonNegative, Positive

PreferenceLossName = Literal["dpo", "ipo", "rpo", "simpo", "kto"]

# Options of each loss in addition to beta.
LOSS_OPTIONS: dict[PreferenceLossName, tuple[str, ...]] = {
    "dpo": ("label_smoothing", "average_logprobs", "sft_weight"),
    "ipo": ("average_logprobs", "sft_weight"),
    "rpo": ("distance", "reward_scale", "average_logprobs", "sft_weight"),
    "simpo": ("target_margin", "sft_weight"),
    "kto": ("desirable_weight", "undesirable_weight"),
}


@dataclass(frozen=True)
class PairDataConfig(PromptColumns, TrainingSets):
    """Training and validation pairs, and the columns of their rows."""

    chosen_column: StrictStr = "chosen"
    """Column of the better response: text, the assistant's message, or a complete chat."""

    rejected_column: StrictStr = "rejected"
    """Column of the worse response."""

    chosen_reward_column: StrictStr | None = None
    """Column with the reward of the chosen response. `null` means a reward of 1. RPO and the
    variants `margin` and `scaled` of reward models read it."""

    rejected_reward_column: StrictStr | None = None
    """Column with the reward of the rejected response. `null` means a reward of 0."""

    max_length: Count | None = None
    """Maximum number of tokens in a sequence. `null` means no limit. An example with a longer
    sequence is dropped, never truncated."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if only one of the two reward columns is set."""
        yield from super().problems(key, run)
        chosen, rejected = self.chosen_reward_column, self.rejected_reward_column
        if (chosen is None) != (rejected is None):
            yield (
                f"{key}.chosen_reward_column={chosen} and {key}.rejected_reward_column={rejected}: "
                "only one of them is set. Set both or neither"
            )


@dataclass(frozen=True)
class PreferenceDataConfig(PairDataConfig):
    """Columns of pairs. For KTO: columns of single responses with the label good or bad."""

    response_column: StrictStr = "response"
    """KTO: column of the response."""

    label_column: StrictStr = "label"
    """KTO: column that is true (or 1) for a good response."""


@dataclass(frozen=True)
class TrainerDPOConfig(SupervisedLoopConfig):
    """Training loop of preference optimisation. A step is one optimizer update."""

    loss: PreferenceLossName = "dpo"
    """`dpo`, `ipo`, `rpo`, `simpo` or `kto`. SimPO uses no reference. KTO learns from single
    responses."""

    beta: Positive | None = None
    """Weight β of the implicit reward. `null` means 0.1, or 2 for SimPO. A larger weight keeps the
    policy closer to the reference."""

    label_smoothing: MinorShare = 0.0
    """DPO: assumed share of pairs with swapped labels (cDPO), below 0.5. With a share of 0.5 or
    more the rejected responses would be preferred."""

    average_logprobs: StrictBool = False
    """DPO, IPO, RPO: average the log-probs over a response's tokens instead of summing them."""

    distance: Literal["square", "forward_kl", "backward_kl"] = "backward_kl"
    """RPO: distance of the implicit reward gap from the data's reward gap. `square`, `forward_kl`
    or `backward_kl`."""

    reward_scale: Positive = 1.0
    """RPO: factor of the data's rewards."""

    target_margin: StrictFloat = 1.0
    """SimPO: target γ of the margin between the chosen and the rejected response."""

    sft_weight: NonNegative = 0.0
    """All but KTO: weight of the chosen response's negative log-likelihood per token."""

    desirable_weight: NonNegative = 1.0
    """KTO: weight of good responses."""

    undesirable_weight: NonNegative = 1.0
    """KTO: weight of bad responses."""

    @property
    def is_paired(self) -> bool:
        """True if an example has two rows: a chosen and a rejected response."""
        return self.loss != "kto"

    @property
    def has_reference(self) -> bool:
        """True if the loss uses the log-probs of the initial policy."""
        return self.loss != "simpo"

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for each option that is set but belongs to another loss."""
        options = sorted({name for names in LOSS_OPTIONS.values() for name in names})
        for name in options:
            value, default = getattr(self, name), getattr(TrainerDPOConfig, name)
            if name not in LOSS_OPTIONS[self.loss] and value != default:
                owners = [loss for loss, names in LOSS_OPTIONS.items() if name in names]
                yield (
                    f"{key}.{name}={value} is an option of {', '.join(owners)}, but {key}.loss="
                    f"{self.loss}. Set it to {default}, or change the loss"
                )


@dataclass(frozen=True)
class DPOTrainerConfig(TrainingConfig):
    """Section ``trainer`` of preference optimisation."""

    dpo: TrainerDPOConfig = field(default_factory=TrainerDPOConfig)


@dataclass(frozen=True)
class RewardDataConfig(PairDataConfig):
    """Columns of pairs. For regression: columns of single responses with ratings."""

    response_column: StrictStr = "response"
    """`regression`: column of the rated response."""

    attribute_columns: tuple[StrictStr, ...] = ()
    """`regression`: columns of ratings. Each cell is a number or null. The reward head has one
    output per column, in this order."""


@dataclass(frozen=True)
class TrainerRewardModelConfig(SupervisedLoopConfig):
    """Training loop of a reward model. A step is one optimizer update."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry` learns from pairs, `regression` from ratings."""

    variant: Literal["plain", "margin", "scaled"] = "plain"
    """`bradley_terry`: use of the strength s of a preference. The loss is -log sigmoid(d) with
    `plain`, -log sigmoid(d - s) with `margin`, and -s log sigmoid(d) with `scaled`, where d is the
    difference of the two rewards."""

    standardize_on: Literal["train", "validation"] | None = None
    """`bradley_terry`: standardise rewards by their mean and deviation on `train` or `validation`,
    which the model stores. `null` leaves rewards unchanged."""

    limit_standardize_examples: Count = 1024
    """Number of pairs to measure, from the beginning of the data."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if columns are missing, or an option of the other loss is set."""
        data = run.data
        is_regression = self.loss == "regression"
        # Options for regression of ratings.
        if is_regression and not data.attribute_columns:
            yield (
                f"{key}.loss=regression needs ratings, but data.attribute_columns is empty. Set "
                "it to the columns of ratings, for example data.attribute_columns=[helpfulness]"
            )
        if is_regression and self.variant != "plain":
            yield f"{key}.variant={self.variant}, but {key}.loss=regression. Set variant=plain"
        if is_regression and self.standardize_on is not None:
            setting = f"{key}.standardize_on={self.standardize_on}"
            yield f"{setting} needs pairs, but {key}.loss=regression. Set it to null"

        # Options for the Bradley-Terry loss on pairs.
        if not is_regression and data.attribute_columns:
            yield (
                f"data.attribute_columns={list(data.attribute_columns)} needs {key}.loss="
                "regression. Set the loss, or data.attribute_columns=[]"
            )
        if not is_regression and self.variant != "plain" and data.chosen_reward_column is None:
            yield (
                f"{key}.variant={self.variant} needs the strength of each preference. Set "
                "data.chosen_reward_column and data.rejected_reward_column, or variant=plain"
            )
        if self.standardize_on == "validation" and data.validation is None:
            yield (
                f"{key}.standardize_on=validation, but data.validation is null. Set "
                "data.validation.source, or use train"
            )


@dataclass(frozen=True)
class RewardTrainerConfig(TrainingConfig):
    """Section ``trainer`` of reward models."""

    reward_model: TrainerRewardModelConfig = field(default_factory=TrainerRewardModelConfig)
