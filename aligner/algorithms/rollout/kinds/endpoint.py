"""The kind ``endpoint``: an agent asks the policy over HTTP."""

from collections.abc import Iterator

from aligner.algorithms.rollout.kinds import EnvironmentKind
from aligner.config import RunConfig, SamplingRunConfig


class Endpoint(EnvironmentKind):
    """A function or a command that asks the policy by OpenAI's interface."""

    rollouts = "aligner.algorithms.rollout.endpoint:EndpointRollouts"
    extra = "serve"

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Refuse a configuration without one agent, and options that an agent does not have."""
        environment = run.environment
        command, factory = environment.command, environment.factory
        if not environment.is_set:
            yield (
                f"{key}.kind=endpoint and neither {key}.command nor {key}.factory: set "
                f"{key}.command='python my_agent.py' or {key}.factory=my_agent.py:run"
            )
        if command is not None and factory is not None:
            yield (
                f"{environment.setting} and {key}.factory={factory}: an agent is one of them; set "
                "the other to null"
            )
        if command is not None and not environment.words:
            yield f"{key}.command={command!r} is empty; give a program and its arguments"
        if environment.rewritten_history != "fork":
            yield (
                f"{key}.rewritten_history={environment.rewritten_history} and {key}.kind=endpoint: "
                "an agent says what the policy reads, and what does not continue it begins "
                "another sequence; set it to fork"
            )
        if run.generation.async_rollouts:
            yield (
                f"generation.async_rollouts=true and {key}.kind=endpoint: agents are answered "
                "while nothing else is done; set one of them to false or messages"
            )
        if isinstance(run, RunConfig) and run.model.ppo.record_kept_tokens:
            yield (
                f"model.ppo.record_kept_tokens={run.model.ppo.record_kept_tokens}: with "
                f"{key}.kind=endpoint nothing is recorded; set it to 0"
            )
