"""What goes with which way to advantages."""

from typing import TYPE_CHECKING

from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.run import RunConfig

_GROUP_BASELINE = ("rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline")
_KEY = "trainer.ppo.advantage.estimator"


def check_credit(config: "RunConfig") -> None:
    """Refuse an estimator without what it needs, and options that are another's."""
    trainer, ppo = config.trainer.ppo, config.model.ppo
    estimator = trainer.advantage.estimator
    named = f"{_KEY}={estimator}"
    if estimator == "gae" and config.critic is None:
        raise ConfigError(
            f"{named} needs a critic, and critic is null; give the section, or use rloo"
        )
    if estimator != "gae":
        _check_critic_free(config, named)
    if estimator in _GROUP_BASELINE and ppo.num_rollouts_per_prompt < 2:
        raise ConfigError(
            f"{named} compares responses to one prompt, and model.ppo.num_rollouts_per_prompt="
            f"{ppo.num_rollouts_per_prompt}; set it to 2 or more (4 to 16 are usual)"
        )
    if trainer.advantage.batch_baseline and estimator != "reinforce":
        raise ConfigError(
            f"trainer.ppo.advantage.batch_baseline=true is an option of reinforce, and {named}; "
            "set it to false"
        )
    if trainer.dynamic_sampling.enabled:
        _check_dynamic_sampling(config)
    cache, longest = trainer.reward.overlong_cache, ppo.length_params.max_length
    if cache is not None and cache > longest:
        raise ConfigError(
            f"trainer.ppo.reward.overlong_cache={cache} is more than "
            f"model.ppo.length_params.max_length={longest}; lower it"
        )


def _check_critic_free(config: "RunConfig", named: str) -> None:
    trainer = config.trainer.ppo
    if config.critic is not None:
        raise ConfigError(
            f"{named} has no critic, and the section critic is given; start from "
            "conf/gpt_reinforce.yaml (examples/train_gpt_reinforce.py), where it is null"
        )
    if trainer.critic_warmup_steps:
        raise ConfigError(
            f"trainer.ppo.critic_warmup_steps={trainer.critic_warmup_steps}, and {named} has no "
            "critic; set it to 0"
        )
    if trainer.discount_factor != 1 and trainer.advantage.estimator != "reinforce_plus_plus":
        raise ConfigError(
            f"trainer.ppo.discount_factor={trainer.discount_factor} needs rewards per token, and "
            f"{named} has one per response; set it to 1"
        )


def _check_dynamic_sampling(config: "RunConfig") -> None:
    key = "trainer.ppo.dynamic_sampling.enabled=true"
    if config.model.ppo.num_rollouts_per_prompt < 2:
        raise ConfigError(
            f"{key} looks for prompts whose responses differ in reward, and "
            f"model.ppo.num_rollouts_per_prompt={config.model.ppo.num_rollouts_per_prompt}; set it "
            "to 2 or more"
        )
