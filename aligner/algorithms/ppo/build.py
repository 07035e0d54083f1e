"""Functions that derive models, loss, estimator and notes of a PPO run from its configuration."""

from dataclasses import fields
from operator import attrgetter
from typing import Any

from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.algorithms.run.engine import Workers, run_settings
from aligner.config import CorrectionConfig, PolicyPPOConfig, RunConfig
from aligner.errors import ConfigError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.user import user_policy_loss
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.types import LossFunction


def start_roles(config: RunConfig, workers: Workers, steps: int) -> tuple[Policy, Value | None]:
    """Start the policy, the reference policy if needed, and the critic (None without a critic)."""
    ppo = config.model.ppo
    samples = ppo.ppo_epochs * ppo.num_rollout_samples
    policy_steps = max(0, steps - config.trainer.ppo.critic_warmup_steps)
    policy = workers.start_policy(
        policy_steps * (samples // config.model.global_batch_size),
        with_reference=needs_reference(config),
    )
    if config.critic is None:
        return policy, None
    value = Value(
        workers.clusters.value,
        config.critic,
        workers.tokenizer,
        model=config.model,
        # The critic also trains in the warm-up steps.
        run=run_settings(config, steps * (samples // config.critic.global_batch_size)),
        backend=config.policy.backend,
    )
    return policy, workers.own(value)


def run_notes(config: RunConfig) -> list[str]:
    """Return notes for the start-up report, about dynamic sampling and LoRA's dropout."""
    notes, lora = [], config.model.peft.lora
    if config.trainer.ppo.dynamic_sampling.enabled:
        notes.append(
            "dynamic sampling: the run ends after trainer.ppo.max_epochs passes over the prompts, "
            "possibly before the number of steps above"
        )
    if lora is not None and lora.adapter_dropout > 0:
        notes.append(
            f"model.peft.lora_tuning.adapter_dropout={lora.adapter_dropout:g} is on in training "
            "and off while sampling: its noise affects ratios and clipping. Set it to 0 to avoid it"
        )
    return notes


def needs_reference(config: RunConfig) -> bool:
    """Return whether the reward or the loss contains a KL term to the reference policy."""
    return kl_in_reward(config) or config.model.ppo.kl_loss.coef > 0


def sampler_is_exact(config: RunConfig) -> bool:
    """Return whether log-probs of sampler and trainer are equal up to float32 rounding.

    They are equal if the policy's workers sample in float32, without options that the trainer does
    not reproduce: a repetition penalty, or ``min_length`` (which bans EOS) together with top-k or
    top-p. The ``min_length`` of a dry run is ignored, because the run sets it itself.
    """
    sampling = config.model.ppo.sampling_params
    restricted = sampling.top_k > 0 or sampling.top_p < 1.0
    bans_eos = config.model.ppo.length_params.min_length > 1 and not config.dry_run
    return (
        config.generation.backend == "megatron"
        and config.trainer.precision == "32"
        and sampling.repetition_penalty == 1.0
        and not (restricted and bans_eos)
    )


def rows_scored_by_training(config: RunConfig, trains_policy: bool = True) -> int:
    """Return the number of leading rows of a rollout that need no separate pass for old log-probs.

    The first mini-batch is trained with the weights that sampled its rows. Training therefore
    computes their old log-probs, unless there are several passes over the rollout. If a KL penalty
    in the reward needs log-probs before training, exact log-probs of the sampler are used. No row
    needs a pass if the policy is not trained in this step (``trains_policy``), or if
    ``correction.old_logprobs`` is ``sampler``.
    """
    ppo = config.model.ppo
    if ppo.correction.old_logprobs == "sampler":
        return ppo.num_rollout_samples
    if kl_in_reward(config) and not sampler_is_exact(config):
        return 0
    if not trains_policy:
        return ppo.num_rollout_samples
    if ppo.ppo_epochs > 1 or ppo.correction.second_moment is not None:
        return 0
    return min(ppo.num_rollout_samples, config.model.global_batch_size)


def kl_in_reward(config: RunConfig) -> bool:
    """Return whether the reward contains a KL penalty to the reference policy."""
    return config.trainer.ppo.initial_policy_kl_penalty > 0


def make_policy_loss(config: RunConfig) -> LossFunction:
    """Return the built-in or the user's policy loss. Raises `ConfigError` for an unusable class."""
    ppo, environment = config.model.ppo, config.environment
    low, high = ppo.ratio_eps_range
    longest = ppo.length_params.max_length
    if environment.is_set:
        longest = min(environment.max_tokens, environment.max_turns * longest)
    # Arguments of the loss, by the key in ``model.ppo`` that sets each argument.
    options: dict[str, dict[str, Any]] = {
        "ratio_eps": {"ratio_eps_low": low, "ratio_eps_high": high},
        "dual_clip": {"dual_clip": ppo.dual_clip},
        "entropy_bonus": {"entropy_bonus": ppo.entropy_bonus},
        "kl_loss.coef": {"kl_coefficient": ppo.kl_loss.coef},
        "kl_loss.estimator": {"kl_estimator": ppo.kl_loss.estimator},
        "truncated_importance_sampling": {"importance_cap": ppo.truncated_importance_sampling},
        **{
            f"correction.{field.name}": {"correction": ppo.correction}
            for field in fields(CorrectionConfig)
            if field.name != "old_logprobs"  # changes the loss's inputs instead
        },
        "ratio_level": {"ratio_level": ppo.ratio_level},
        "surrogate": {"surrogate": ppo.surrogate},
        "loss_aggregation": {
            "aggregation": ppo.loss_aggregation,
            "max_response_length": longest if ppo.loss_aggregation == "fixed_length" else None,
        },
    }
    built_in = {name: value for group in options.values() for name, value in group.items()}
    if ppo.loss is None:
        return PPOPolicyLoss(**built_in)
    # A user's loss must accept the arguments of all keys that differ from the defaults.
    defaults = PolicyPPOConfig()
    changed = {
        f"model.ppo.{key}={value}": tuple(options[key])
        for key in options
        if (value := attrgetter(key)(ppo)) != attrgetter(key)(defaults)
    }
    return user_policy_loss(
        ppo.loss, ppo.loss_kwargs, built_in, changed, has_reference=needs_reference(config)
    )


def make_estimator(config: RunConfig) -> UserEstimator | None:
    """Return the user's advantage estimator after a test, or None for a built-in estimator."""
    trainer, function = config.trainer.ppo, config.trainer.ppo.advantage.function
    if function is None:
        return None
    has_critic = config.critic is not None
    estimator = UserEstimator(function, trainer.advantage.kwargs, has_critic=has_critic)
    # A changed discount factor must have an effect.
    if trainer.discount_factor != 1 and not estimator.takes("discount_factor"):
        raise ConfigError(
            f"trainer.ppo.discount_factor={trainer.discount_factor}, but {estimator} does not "
            "accept discount_factor. Add this parameter to the function, or set the key to 1"
        )
    estimator.try_out(config.model.ppo.num_rollouts_per_prompt)
    return estimator
