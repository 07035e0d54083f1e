"""The kind ``messages``: an environment is called after each message of the policy."""

from collections.abc import Iterator

from aligner.algorithms.rollout.kinds import EnvironmentKind
from aligner.config import SamplingRunConfig


class Messages(EnvironmentKind):
    """A class with the methods of `aligner.environments.MessageEnv`."""

    rollouts = "aligner.algorithms.rollout.environments:EnvironmentRollouts"

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Report a command."""
        if run.environment.command is not None:
            yield (
                f"{run.environment.setting} is an agent that queries the policy, but {key}.kind="
                f"messages. Set {key}.kind=endpoint"
            )
