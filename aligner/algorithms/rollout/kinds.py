"""Kinds of environments (values of ``environment.kind``), with checks of their configuration."""

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
    """Base class of the kinds of environments.

    ``rollouts``: import path of a class or function that returns a `RolloutSource`, given the
    arguments of `open`. Classes derived from `ConversationRollouts` support retries and limits.
    ``extra``: optional dependency group of this package that a run needs, or None.
    ``accepts_tools``: whether ``environment.tools`` may replace the environment's class.
    """

    rollouts: ClassVar[str]
    accepts_tools: ClassVar[bool] = False
    extra: ClassVar[str | None] = None

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Yield a message for each error in the configuration. ``key``: ``environment``."""
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
        """Start the environments, until ``closing`` closes. All ranks must call this method.

        ``tokenizer`` and ``architecture``: the policy's. ``columns``: result of
        `aligner.data.prompts.columns_of_rows`.
        """
        make = load_function(cls.rollouts, key="environment.kind")
        return make(config, tokenizer, architecture, columns, closing)


class Messages(EnvironmentKind):
    """Environments that reply to messages: classes like `aligner.environments.MessageEnv`."""

    rollouts = "aligner.algorithms.rollout.environments:EnvironmentRollouts"
    accepts_tools = True

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Report an agent's command, which this kind cannot run."""
        if run.environment.command is not None:
            yield (
                f"{run.environment.setting} is an agent that sends requests to the policy, but "
                f"{key}.kind=messages. Set {key}.kind=endpoint"
            )


class Endpoint(EnvironmentKind):
    """Agents: a function or a command that sends requests to the policy with OpenAI's API."""

    rollouts = "aligner.algorithms.rollout.endpoint:EndpointRollouts"
    extra = "serve"

    @classmethod
    def problems(cls, key: str, run: SamplingRunConfig) -> Iterator[str]:
        """Report a missing agent, two agents, and options that agents do not support."""
        # The agent itself.
        environment = run.environment
        command, factory = environment.command, environment.factory
        if not environment.is_set:
            yield (
                f"{key}.kind=endpoint needs an agent. Set {key}.command='python my_agent.py' or "
                f"{key}.factory=my_agent.py:run"
            )
        if command is not None and factory is not None:
            yield (
                f"{environment.setting} and {key}.factory={factory} are both set, but only one "
                f"agent can run. Set {key}.command=null or {key}.factory=null"
            )
        if command is not None and not environment.words:
            yield f"{key}.command={command!r} is empty. Set a program and its arguments"
        # Options of other kinds.
        if environment.rewritten_history != "fork":
            yield (
                f"{key}.rewritten_history={environment.rewritten_history} does not work with "
                f"{key}.kind=endpoint: a prompt that does not continue a sequence of the agent "
                f"starts another sequence. Set {key}.rewritten_history=fork"
            )
        if run.generation.async_rollouts:
            yield (
                f"generation.async_rollouts=true does not work with {key}.kind=endpoint: agents "
                "get no answers during training. Set generation.async_rollouts=false, or "
                f"{key}.kind=messages"
            )
        if isinstance(run, RunConfig) and run.model.ppo.record_kept_tokens:
            yield (
                f"model.ppo.record_kept_tokens={run.model.ppo.record_kept_tokens}: "
                f"{key}.kind=endpoint does not record kept tokens. Set record_kept_tokens=0"
            )
