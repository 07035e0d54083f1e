"""Rules for combining options of credit assignment."""

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
    if trainer.advantage.kwargs and not trainer.advantage.is_own:
        raise ConfigError(
            f"trainer.ppo.advantage.kwargs={dict(trainer.advantage.kwargs)} are of a function of "
            f"your own, and {named}; leave them out, or give its path as {_KEY}"
        )
    if ppo.loss_kwargs and ppo.loss is None:
        raise ConfigError(
            f"model.ppo.loss_kwargs={dict(ppo.loss_kwargs)} are of a loss of your own, and "
            "model.ppo.loss is null; leave them out, or give its path as model.ppo.loss"
        )
    if estimator != "gae" and not trainer.advantage.is_own:
        _check_critic_free(config, named)
    if trainer.critic_warmup_steps and config.critic is None:
        raise ConfigError(
            f"trainer.ppo.critic_warmup_steps={trainer.critic_warmup_steps}, and {named} has no "
            "critic; set it to 0"
        )
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
    _check_kl(config)
    cache, longest = trainer.reward.overlong_cache, ppo.length_params.max_length
    if cache is not None and cache > longest:
        raise ConfigError(
            f"trainer.ppo.reward.overlong_cache={cache} is more than "
            f"model.ppo.length_params.max_length={longest}; lower it"
        )


def _check_kl(config: "RunConfig") -> None:
    trainer, kl_loss = config.trainer.ppo, config.model.ppo.kl_loss
    if trainer.kl_controller.mode == "adaptive" and trainer.initial_policy_kl_penalty == 0:
        raise ConfigError(
            "trainer.ppo.kl_controller.mode=adaptive multiplies the weight of the KL penalty, and "
            "trainer.ppo.initial_policy_kl_penalty=0 stays 0; give the weight to begin with "
            "(0.01), or set the mode to fixed"
        )
    if kl_loss.coef > 0 and kl_loss.estimator == "k1":
        raise ConfigError(
            "model.ppo.kl_loss.estimator=k1: its gradient has mean 0 whatever the KL, so as a term "
            "of the loss it holds the policy to nothing; use k2 (the gradient of the reverse KL) "
            "or k3 (of the forward KL)"
        )


def _check_critic_free(config: "RunConfig", named: str) -> None:
    trainer = config.trainer.ppo
    if config.critic is not None:
        raise ConfigError(
            f"{named} has no critic, and the section critic is given; run aligner train-reinforce "
            "(examples/train_gpt_reinforce.py), where critic is null, or set critic=null"
        )
    if trainer.normalize_advantages:
        raise ConfigError(
            f"trainer.ppo.normalize_advantages=true takes the mean over all tokens off, also where "
            f"{named} has set the advantage to 0; set it to false, or use "
            "reinforce_plus_plus_baseline, which whitens by definition"
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
    if config.trainer.ppo.max_steps < 0:
        critic = {} if config.critic is None else {"critic": config.critic.optim.sched}
        for role, sched in {"model": config.model.optim.sched, **critic}.items():
            if sched.name != "constant" and sched.max_steps is None:
                raise ConfigError(
                    f"{role}.optim.sched.name={sched.name} decays over the updates of the run, and "
                    f"with {key} nobody knows how many trainer.ppo.max_epochs makes; set "
                    f"{role}.optim.sched.max_steps or trainer.ppo.max_steps"
                )
