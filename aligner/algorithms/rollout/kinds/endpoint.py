"""The kind ``endpoint``: an agent asks the policy over HTTP."""

from aligner.algorithms.rollout.kinds import EnvironmentKind
from aligner.config import RunConfig, SamplingRunConfig
from aligner.errors import ConfigError


class Endpoint(EnvironmentKind):
    """A function or a command that asks the policy by OpenAI's interface."""

    rollouts = "aligner.algorithms.rollout.endpoint:EndpointRollouts"
    extra = "serve"

    @classmethod
    def check(cls, config: SamplingRunConfig) -> None:
        """Refuse a configuration without one agent, and options that an agent does not have."""
        environment = config.environment
        command = environment.command
        if not environment.is_set:
            raise ConfigError(
                "environment.kind=endpoint and neither environment.command nor "
                "environment.factory: set environment.command='python my_agent.py' or "
                "environment.factory=my_agent.py:run"
            )
        if command is not None and environment.factory is not None:
            raise ConfigError(
                f"{environment.named} and environment.factory={environment.factory}: an agent is "
                "one of them; set the other to null"
            )
        if command is not None and not environment.words:
            raise ConfigError(
                f"environment.command={command!r} is empty; give a program and its arguments"
            )
        if environment.rewritten_history != "fork":
            raise ConfigError(
                f"environment.rewritten_history={environment.rewritten_history} and "
                "environment.kind=endpoint: an agent says what the policy reads, and what does "
                "not continue it begins another sequence; set it to fork"
            )
        if config.generation.async_rollouts:
            raise ConfigError(
                "generation.async_rollouts=true and environment.kind=endpoint: agents are "
                "answered while nothing else is done; set one of them to false or messages"
            )
        if isinstance(config, RunConfig) and config.model.ppo.record_kept_tokens:
            raise ConfigError(
                f"model.ppo.record_kept_tokens={config.model.ppo.record_kept_tokens}: with "
                "environment.kind=endpoint nothing is recorded; set it to 0"
            )
