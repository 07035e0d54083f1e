"""Rules of runs that learn from given examples: preferences, ratings, distillation."""

from dataclasses import fields

from aligner.config.algorithms.distill import TrainerDistillConfig
from aligner.config.algorithms.preference import LOSS_OPTIONS, PairDataConfig, TrainerDPOConfig
from aligner.config.run import DistillRunConfig, DPORunConfig, RewardRunConfig
from aligner.errors import ConfigError


def check_preference(config: DPORunConfig) -> None:
    """Refuse another loss's options."""
    loop = config.trainer.dpo
    _check_options(loop)
    if loop.label_smoothing >= 0.5:
        raise ConfigError(
            f"trainer.dpo.label_smoothing={loop.label_smoothing} must be below 0.5; from there on "
            "the rejected responses would be preferred"
        )
    check_reward_columns(config.data)


def check_reward_columns(data: PairDataConfig) -> None:
    """Refuse the reward of one response without that of the other."""
    chosen, rejected = data.chosen_reward_column, data.rejected_reward_column
    if (chosen is None) != (rejected is None):
        raise ConfigError(
            f"data.chosen_reward_column={chosen} and data.rejected_reward_column={rejected}: give "
            "both or none"
        )


def _check_options(loop: TrainerDPOConfig) -> None:
    defaults = {each.name: each.default for each in fields(TrainerDPOConfig)}
    own = LOSS_OPTIONS[loop.loss]
    for key in {key: None for keys in LOSS_OPTIONS.values() for key in keys}:
        value = getattr(loop, key)
        if key not in own and value != defaults[key]:
            owners = [loss for loss, keys in LOSS_OPTIONS.items() if key in keys]
            raise ConfigError(
                f"trainer.dpo.{key}={value} is an option of {', '.join(owners)}, and "
                f"trainer.dpo.loss={loop.loss}; leave it at {defaults[key]}, or change the loss"
            )


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


def check_distill(config: DistillRunConfig) -> None:
    """Refuse what distillation does not have, and options that nobody reads."""
    loop = config.trainer.distill
    if config.policy.backend != "megatron":
        raise ConfigError(
            f"policy.backend={config.policy.backend}: student and teacher are megatron-core "
            "models; set policy.backend=megatron"
        )
    if loop.kl != "mixed" and loop.mixed_weight != TrainerDistillConfig.mixed_weight:
        raise ConfigError(
            f"trainer.distill.mixed_weight={loop.mixed_weight} weighs the two divergences of "
            f"kl=mixed, and trainer.distill.kl={loop.kl}; leave it at "
            f"{TrainerDistillConfig.mixed_weight}, or set kl=mixed"
        )
    if loop.on_policy and config.data.messages_column is not None:
        raise ConfigError(
            f"data.messages_column={config.data.messages_column} is a chat with its answers, and "
            "trainer.distill.on_policy=true reads prompts alone; name data.prompt_column instead"
        )
