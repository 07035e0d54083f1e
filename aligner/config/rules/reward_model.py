"""Checks of reward-model training."""

from aligner.config.rules.preference import check_reward_columns
from aligner.config.run import RewardRunConfig
from aligner.errors import ConfigError


def check_reward_model(config: RewardRunConfig) -> None:
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
