"""What a reward model learns from, and the loop that trains it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from aligner.config.fields import Count
from aligner.config.preference import PairDataConfig, check_reward_columns
from aligner.config.trainer import SupervisedLoopConfig, TrainingConfig
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.run import RewardRunConfig


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


def check_reward_model(config: "RewardRunConfig") -> None:
    """Refuse a loss without its data, and data without its loss."""
    trainer, data = config.trainer.reward_model, config.data
    key = "trainer.reward_model"
    if config.policy.backend != "megatron":
        raise ConfigError(
            f"policy.backend={config.policy.backend}: reward models are trained on megatron-core; "
            "set policy.backend=megatron"
        )
    if trainer.loss == "regression":
        if not data.attribute_columns:
            raise ConfigError(
                f"{key}.loss=regression rates attributes, and data.attribute_columns is empty; "
                "name the columns of ratings, for example data.attribute_columns=[helpfulness]"
            )
        if trainer.variant != "plain":
            raise ConfigError(
                f"{key}.variant={trainer.variant} is one of bradley_terry, and {key}.loss="
                "regression; leave it at plain"
            )
        if trainer.standardize_on is not None:
            raise ConfigError(
                f"{key}.standardize_on={trainer.standardize_on}: ratings have a scale of their "
                "own, which regression keeps; set it to null"
            )
        return
    if data.attribute_columns:
        raise ConfigError(
            f"data.attribute_columns={list(data.attribute_columns)} are for {key}.loss="
            "regression; set that, or leave them empty"
        )
    check_reward_columns(data)
    if trainer.variant != "plain" and data.chosen_reward_column is None:
        raise ConfigError(
            f"{key}.variant={trainer.variant} reads how strong a preference is; give "
            "data.chosen_reward_column and data.rejected_reward_column, or set variant=plain"
        )
    if trainer.standardize_on == "validation" and data.validation is None:
        raise ConfigError(
            f"{key}.standardize_on=validation, and data.validation is null; give it, or use train"
        )
