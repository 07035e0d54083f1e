"""Kinds of environments: values of ``environment.kind``. Code for runs is imported later."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from aligner.config import RunConfig, SamplingRunConfig
from aligner.importing import load_function

if TYPE_CHECKING:
    from aligner.algorithms.rollout.rollout import RolloutSource
    from aligner.architecture import GPTArchitecture
    from aligner.data.tokenizers.tokenizer import Tokenizer


class EnvironmentKind:
    """Base of the kinds of environments.

    ``rollouts``: path of a class or function that returns a `RolloutSource` for the arguments of
    `open`. `ConversationRollouts` brings retries and limits. ``extra``: extra of this package that
    a run needs, or None.
    """

    rollouts: ClassVar[str]
    extra: ClassVar[str | None] = None

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Yield a message for each broken rule. ``key``: ``environment``."""
        yield from ()

    @classmethod
    def open(
        cls,
        config: SamplingRunConfig,
        tokenizer: "Tokenizer",
        architecture: "GPTArchitecture",
        columns: Mapping[str, str | None],
        closing: ExitStack,
    ) -> "RolloutSource":
        """Start the environments on all ranks, until ``closing`` closes.

        ``tokenizer`` and ``architecture``: the policy's. ``columns``: see `columns_of_rows` in
        `aligner.data.prompts`.
        """
        make = load_function(cls.rollouts, key="environment.kind")
        return make(config, tokenizer, architecture, columns, closing)


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
