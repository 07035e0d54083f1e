"""Checks of preference optimisation: the loss's options, the data's columns."""

from dataclasses import fields

from aligner.config.algorithms.preference import LOSS_OPTIONS, PairDataConfig, TrainerDPOConfig
from aligner.config.run import DPORunConfig
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
