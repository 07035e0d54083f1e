"""The kind ``endpoint``: an agent queries the policy over HTTP."""

from collections.abc import Iterator

from aligner.algorithms.rollout.kinds import EnvironmentKind
from aligner.config import RunConfig, SamplingRunConfig


class Endpoint(EnvironmentKind):
    """A function or a command that queries the policy with OpenAI's API."""

    rollouts = "aligner.algorithms.rollout.endpoint:EndpointRollouts"
    extra = "serve"

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Report a missing or a second agent, and options without effect on agents."""
        # The agent itself.
        environment = run.environment
        command, factory = environment.command, environment.factory
        if not environment.is_set:
            yield (
                f"{key}.kind=endpoint and neither {key}.command nor {key}.factory: set "
                f"{key}.command='python my_agent.py' or {key}.factory=my_agent.py:run"
            )
        if command is not None and factory is not None:
            yield (
                f"{environment.setting} and {key}.factory={factory} are both set, but an agent is "
                "one of them. Set the other to null"
            )
        if command is not None and not environment.words:
            yield f"{key}.command={command!r} is empty. Set a program and its arguments"
        # Options of other kinds.
        if environment.rewritten_history != "fork":
            yield (
                f"{key}.rewritten_history={environment.rewritten_history} and {key}.kind=endpoint: "
                "an agent chooses its prompts, and a prompt that does not continue a sequence "
                "starts another. Set it to fork"
            )
        if run.generation.async_rollouts:
            yield (
                f"generation.async_rollouts=true and {key}.kind=endpoint: agents are answered "
                "only while no training runs. Set one of them to false or messages"
            )
        if isinstance(run, RunConfig) and run.model.ppo.record_kept_tokens:
            yield (
                f"model.ppo.record_kept_tokens={run.model.ppo.record_kept_tokens}: "
                f"{key}.kind=endpoint does not record kept tokens. Set it to 0"
            )
