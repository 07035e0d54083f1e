"""The kind ``messages``: an environment is called after each message of the policy."""

from aligner.algorithms.rollout.kinds import EnvironmentKind
from aligner.config import SamplingRunConfig
from aligner.errors import ConfigError


class Messages(EnvironmentKind):
    """A class with the methods of `aligner.environments.MessageEnv`."""

    rollouts = "aligner.algorithms.rollout.environments:EnvironmentRollouts"

    @classmethod
    def check(cls, config: SamplingRunConfig) -> None:
        """Refuse a command."""
        if config.environment.command is not None:
            raise ConfigError(
                f"{config.environment.named} is an agent that asks the policy, and "
                "environment.kind=messages; set environment.kind=endpoint"
            )
