"""Checks of the environment against the rest of a run."""

from aligner.config.run import RunConfig, SamplingRunConfig
from aligner.errors import ConfigError


def check_environment(config: SamplingRunConfig) -> None:
    """Refuse an environment that nobody reads, and options that mean nothing beside it."""
    environment, rollout = config.environment, config.model.rollout
    environment.kind_class.check(config)
    if environment.is_set != (config.reward.kind == "environment"):
        raise ConfigError(
            f"reward.kind={config.reward.kind} and {environment.named}: "
            "set reward=environment and environment.factory=my_game.py:Class, or neither"
        )
    if isinstance(config, RunConfig):
        _check_credit(config)
    if not environment.is_set and environment.chat_template is not None:
        raise ConfigError(
            f"environment.chat_template={environment.chat_template} is for conversations, and "
            "environment.factory is null; leave it out"
        )
    if not environment.is_set:
        return
    response = rollout.length_params.max_length
    if environment.max_tokens <= response:
        raise ConfigError(
            f"environment.max_tokens={environment.max_tokens} leaves no room for a prompt before a "
            f"response of {config.model.rollout_key}.length_params.max_length={response}; raise it"
        )
    if config.reward.function is not None:
        raise ConfigError(
            f"reward.function={config.reward.function} scores single responses, and the rewards "
            "are the environment's; set it to null"
        )
    if config.data.max_prompt_length is not None:
        raise ConfigError(
            f"data.max_prompt_length={config.data.max_prompt_length}: prompts are the "
            "environment's; set it to null, and bound conversations by environment.max_tokens"
        )


def _check_credit(config: RunConfig) -> None:
    trainer = config.trainer.ppo
    has_turns = config.environment.is_set
    for key, value in (
        ("trainer.ppo.timestep", trainer.timestep),
        ("trainer.ppo.advantage.credit", trainer.advantage.credit),
    ):
        if value == "turn" and not has_turns:
            raise ConfigError(
                f"{key}=turn is for conversations of several turns, and environment.factory is "
                "null; leave it out"
            )
    estimator = trainer.advantage.estimator
    if trainer.timestep == "turn" and estimator != "gae":
        raise ConfigError(
            f"trainer.ppo.timestep=turn is the unit of gae's γ and λ, and "
            f"trainer.ppo.advantage.estimator={estimator}; set it to token"
            + ("" if trainer.advantage.is_own else ", and trainer.ppo.advantage.credit=turn")
        )
    if trainer.advantage.credit == "turn" and (estimator == "gae" or trainer.advantage.is_own):
        raise ConfigError(
            "trainer.ppo.advantage.credit=turn says what is compared inside a group, and "
            f"trainer.ppo.advantage.estimator={estimator}; leave it out (with gae, rewards stand "
            "at their turns in any case)"
        )
    if trainer.advantage.credit == "turn" and trainer.advantage.batch_baseline:
        raise ConfigError(
            "trainer.ppo.advantage.batch_baseline=true is one number for all responses, and "
            "trainer.ppo.advantage.credit=turn; set one of them to false or trajectory"
        )
    if not has_turns:
        return
    if trainer.reward.shift != 0:
        raise ConfigError(
            f"trainer.ppo.reward.shift={trainer.reward.shift:g} would be paid for every turn, so "
            "that more of them pay more; set it to 0"
        )
    if trainer.reward.overlong_cache is not None:
        raise ConfigError(
            f"trainer.ppo.reward.overlong_cache={trainer.reward.overlong_cache} speaks of the "
            "length of a single response, and environment.factory is set; set it to null"
        )
