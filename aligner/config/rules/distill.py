"""Checks of distillation."""

from aligner.config.algorithms.distill import TrainerDistillConfig
from aligner.config.run import DistillRunConfig
from aligner.errors import ConfigError


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
