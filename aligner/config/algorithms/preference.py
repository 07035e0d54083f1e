"""Preferences and ratings, and loops over them: preference optimisation and reward models."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.config.algorithms.process import TrainingConfig
from aligner.config.algorithms.trainer import SupervisedLoopConfig
from aligner.config.data import PromptColumns, TrainingSets
from aligner.config.fields import Count, MinorShare, NonNegative, Positive

PreferenceLossName = Literal["dpo", "ipo", "rpo", "simpo", "kto"]

# The options that each loss has beside beta.
LOSS_OPTIONS: dict[PreferenceLossName, tuple[str, ...]] = {
    "dpo": ("label_smoothing", "average_logprobs", "sft_weight"),
    "ipo": ("average_logprobs", "sft_weight"),
    "rpo": ("distance", "reward_scale", "average_logprobs", "sft_weight"),
    "simpo": ("target_margin", "sft_weight"),
    "kto": ("desirable_weight", "undesirable_weight"),
}


@dataclass(frozen=True)
class PairDataConfig(PromptColumns, TrainingSets):
    """Training and validation pairs, and how a row becomes one."""

    chosen_column: StrictStr = "chosen"
    """Column of the better response: text, the assistant's message, or a whole chat."""

    rejected_column: StrictStr = "rejected"
    """Column of the worse response."""

    chosen_reward_column: StrictStr | None = None
    """Column of a number, the reward of the chosen response. `null` means 1.

    RPO reads both rewards, and the variants `margin` and `scaled` of reward models, to which their
    difference is the strength of the preference.
    """

    rejected_reward_column: StrictStr | None = None
    """Column of a number, the reward of the rejected response. `null` means 0."""

    max_length: Count | None = None
    """Tokens of a sequence; examples with a longer one are dropped and counted.

    `null` means none are. Never cut.
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse the reward of one response without that of the other."""
        chosen, rejected = self.chosen_reward_column, self.rejected_reward_column
        if (chosen is None) != (rejected is None):
            yield (
                f"{key}.chosen_reward_column={chosen} and {key}.rejected_reward_column={rejected}: "
                "give both or none"
            )


@dataclass(frozen=True)
class PreferenceDataConfig(PairDataConfig):
    """The same, or for KTO rows that hold one response and its label, good or bad."""

    response_column: StrictStr = "response"
    """KTO: column of the response."""

    label_column: StrictStr = "label"
    """KTO: column of true (or 1) where the response is good."""


@dataclass(frozen=True)
class TrainerDPOConfig(SupervisedLoopConfig):
    """The loop; a step is one optimizer update."""

    loss: PreferenceLossName = "dpo"
    """`dpo`, `ipo`, `rpo`, `simpo` or `kto`.

    SimPO has no reference; KTO learns from single responses.
    """

    beta: Positive | None = None
    """Weight of the implicit reward, the cost of leaving the reference. `null` means 0.1, SimPO 2.
    """

    label_smoothing: MinorShare = 0.0
    """DPO: share of pairs labelled the wrong way round (cDPO); below 0.5.

    From there on the rejected responses would be preferred.
    """

    average_logprobs: StrictBool = False
    """DPO, IPO, RPO: mean over a response's tokens, not their sum."""

    distance: Literal["square", "forward_kl", "backward_kl"] = "backward_kl"
    """RPO: `square`, `forward_kl` or `backward_kl`, from the gap of rewards."""

    reward_scale: Positive = 1.0
    """RPO: the data's rewards are multiplied by it."""

    target_margin: StrictFloat = 1.0
    """SimPO: γ, by how much the chosen response is to lead."""

    sft_weight: NonNegative = 0.0
    """Not KTO: weight of the chosen response's negative log-likelihood per token."""

    desirable_weight: NonNegative = 1.0
    """KTO: weight of good responses."""

    undesirable_weight: NonNegative = 1.0
    """KTO: weight of bad responses."""

    @property
    def is_paired(self) -> bool:
        """True if an example is two responses, in adjacent rows."""
        return self.loss != "kto"

    @property
    def has_reference(self) -> bool:
        """True if the loss reads the log-probs of the initial weights."""
        return self.loss != "simpo"

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse options of another loss."""
        options = sorted({name for names in LOSS_OPTIONS.values() for name in names})
        for name in options:
            value, default = getattr(self, name), getattr(TrainerDPOConfig, name)
            if name not in LOSS_OPTIONS[self.loss] and value != default:
                owners = [loss for loss, names in LOSS_OPTIONS.items() if name in names]
                yield (
                    f"{key}.{name}={value} is an option of {', '.join(owners)}, and {key}.loss="
                    f"{self.loss}. Leave it at {default}, or change the loss"
                )


@dataclass(frozen=True)
class DPOTrainerConfig(TrainingConfig):
    """The trainer of a preference run."""

    dpo: TrainerDPOConfig = field(default_factory=TrainerDPOConfig)


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
    by them. `null` means it does not.
    """

    limit_standardize_examples: Count = 1024
    """Pairs there that are measured, the first so many."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse a loss without its data, and options and data of the other loss."""
        data, rates = run.data, self.loss == "regression"
        if run.policy.backend != "megatron":
            yield (
                f"policy.backend={run.policy.backend}: reward models are trained on megatron-core. "
                "Set policy.backend=megatron"
            )
        if rates and not data.attribute_columns:
            yield (
                f"{key}.loss=regression rates attributes, and data.attribute_columns is empty. "
                "Name the columns of ratings, for example data.attribute_columns=[helpfulness]"
            )
        if rates and self.variant != "plain":
            yield (
                f"{key}.variant={self.variant} is one of bradley_terry, and {key}.loss=regression. "
                "Leave it at plain"
            )
        if rates and self.standardize_on is not None:
            yield (
                f"{key}.standardize_on={self.standardize_on}: ratings have a scale of their own, "
                "which regression keeps. Set it to null"
            )
        if not rates and data.attribute_columns:
            yield (
                f"data.attribute_columns={list(data.attribute_columns)} are for {key}.loss="
                "regression. Set that, or leave them empty"
            )
        if not rates and self.variant != "plain" and data.chosen_reward_column is None:
            yield (
                f"{key}.variant={self.variant} reads how strong a preference is. Give "
                "data.chosen_reward_column and data.rejected_reward_column, or set variant=plain"
            )
        if self.standardize_on == "validation" and data.validation is None:
            yield (
                f"{key}.standardize_on=validation, and data.validation is null. Give it, or use "
                "train"
            )


@dataclass(frozen=True)
class RewardTrainerConfig(TrainingConfig):
    """The trainer of a reward model."""

    reward_model: TrainerRewardModelConfig = field(default_factory=TrainerRewardModelConfig)
