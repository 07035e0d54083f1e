"""Environment of a policy, and limits of its conversations."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import AfterValidator, StrictStr
from pydantic_core import PydanticCustomError

from aligner.catalog import ENVIRONMENT_KINDS
from aligner.config.combinations import ReadIf
from aligner.config.fields import Count, FilePath, Function, Integer, Seconds, UserClass, one_of
from aligner.importing import load_function

_TOOLS_CLASS = "aligner.environments.functions:FunctionTools"
WITHOUT_ENVIRONMENT = ReadIf(
    lambda run: not run.has_environment,
    "applies to runs without an environment (arguments of an environment: environment.kwargs)",
)


def _without_open_quotation(command: str) -> str:
    try:
        shlex.split(command)
    except ValueError as error:
        raise PydanticCustomError(
            "command",
            "{key}={command} cannot be split into words: {error}. Write it as a list of words",
            {"command": repr(command), "error": str(error)},
        ) from error
    return command


@dataclass(frozen=True)
class EnvironmentConfig:
    """Environment for conversations of several turns, with the option `reward=environment`."""

    kind: Annotated[StrictStr, one_of(ENVIRONMENT_KINDS, or_path="package.module:Class")] = (
        "messages"
    )
    """Interface between policy and environment. `messages`: a class that receives each message of
    the policy. `endpoint`: an agent that calls the policy over HTTP (docs/environments.md#agents).
    Or a user-defined class, `path/to/file.py:Class` (docs/environments.md#custom-kinds)."""

    factory: UserClass | None = None
    """Class of the environment, `package.module:Class` or `path/to/file.py:Class`. With
    `kind=endpoint`, an agent's function. `null` means no environment (docs/environments.md)."""

    tools: tuple[Function, ...] = ()
    """Instead of `factory`: functions that the policy may call, `package.module:function`. The
    column `prompt` is the first message. Type hints and docstrings describe the functions to the
    policy. The function `environment.kwargs.reward` scores the answer. It takes the arguments of
    `reward.function`."""

    command: (
        Annotated[StrictStr, AfterValidator(_without_open_quotation)] | tuple[StrictStr, ...] | None
    ) = None
    """With `kind=endpoint`, instead of `factory`: a program and its arguments. A list of words, or
    text that is split as in a shell. No shell runs."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional keyword arguments of the constructor, or of the agent."""

    max_turns: Annotated[Integer, Interval(ge=1, le=1000)] = 8
    """Maximum number of messages of the policy in a conversation."""

    max_tokens: Count = 1024
    """Maximum number of tokens in a conversation, with the sequences of all its forks."""

    unscored: Literal["zero", "mask"] = "zero"
    """After a conversation that reaches a limit before any turn is scored: train with reward 0
    (`zero`), or exclude it (`mask`)."""

    failed: Literal["retry", "zero"] = "retry"
    """After an environment or agent raises, dies or exceeds a time limit: `retry` the conversation,
    or train with reward `zero`. See docs/environments.md#when-an-environment-fails."""

    timeout_s: Seconds = 60.0
    """Time limit of one call of an environment, in seconds, after which its process is killed. For
    an agent, the limit applies between an answer of the policy and the next request or the end."""

    total_timeout_s: Seconds = 600.0
    """Time limit of all calls of a conversation together, in seconds."""

    concurrency: Count = 16
    """Conversations at the same time, each with a separate process."""

    memory_mb: Annotated[Integer, Interval(ge=64, le=2**30)] | None = None
    """MiB that each process of an environment may allocate. `null` means no limit. Beyond the limit
    an allocation raises MemoryError."""

    retries: Annotated[Integer, Interval(ge=0, le=1000)] = 16
    """Failures of environments and of the engine that a rollout tolerates by repetition. The next
    failure ends the run."""

    rewritten_history: Literal["fork", "refuse", "keep"] = "fork"
    """Treatment of a chat template that changes earlier turns (docs/environments.md#tokens).
    `fork`: continue with a new sequence. `refuse`: end the run. `keep`: continue from the sampled
    tokens."""

    chat_template: FilePath | None = None
    """Jinja file that replaces the tokenizer's chat template, also in the trained model."""

    @property
    def kind_class(self) -> Any:
        """Subclass of `aligner.algorithms.rollout.kinds.EnvironmentKind` that ``kind`` selects."""
        path = ENVIRONMENT_KINDS.get(self.kind, self.kind)
        return load_function(path, key="environment.kind", kind="class")

    @property
    def is_set(self) -> bool:
        """True if an environment is configured."""
        return self.factory is not None or self.command is not None or bool(self.tools)

    @property
    def environment_class(self) -> str | None:
        """Import path of the environment's class: ``factory``, or a built-in one for ``tools``."""
        return _TOOLS_CLASS if self.tools else self.factory

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the environment's class: ``kwargs``, and ``tools`` if set."""
        return dict(self.kwargs, tools=list(self.tools)) if self.tools else dict(self.kwargs)

    @property
    def words(self) -> list[str]:
        """``command`` as a list of words. Empty if there is no command."""
        return (
            shlex.split(self.command) if isinstance(self.command, str) else list(self.command or ())
        )

    @property
    def setting(self) -> str:
        """The option that selects the environment, as ``key=value`` for error messages."""
        if self.command is not None:
            return f"environment.command={shlex.join(self.words)!r}"
        tools = f"environment.tools={list(self.tools)}"
        return tools if self.tools else f"environment.factory={self.factory}"

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for options that exclude each other, and for too low limits."""
        yield from self.kind_class.problems(key, run)
        if not self.is_set:
            return

        if self.tools and (self.factory or self.command or not self.kind_class.accepts_tools):
            yield (
                f"{key}.tools={list(self.tools)} are a complete environment. Set {key}.factory and "
                f"{key}.command to null, and leave {key}.kind out"
            )

        # Limits of a conversation.
        response = run.model.rollout.length_params.max_length
        if self.max_tokens <= response:
            yield (
                f"{key}.max_tokens={self.max_tokens} leaves no room for a prompt before a response "
                f"of {run.model.rollout_key}.length_params.max_length={response}. Raise it"
            )
        if run.data.max_prompt_length is not None:
            yield (
                f"data.max_prompt_length={run.data.max_prompt_length}: the environment provides "
                f"the prompts. Set it to null, and limit conversations by {key}.max_tokens"
            )
