"""The environment that a policy converses with, and the limits of a conversation."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import AfterValidator, StrictStr
from pydantic_core import PydanticCustomError

from aligner.catalog import ENVIRONMENT_KINDS
from aligner.config.combinations import ReadIf
from aligner.config.fields import Count, FilePath, Integer, Seconds, UserClass, one_of
from aligner.importing import load_function

WITHOUT_ENVIRONMENT = ReadIf(
    lambda run: not run.has_environment,
    "is for runs without an environment; environment.kwargs gives arguments to the environment",
)


def _without_open_quotation(command: str) -> str:
    try:
        shlex.split(command)
    except ValueError as error:
        raise PydanticCustomError(
            "command",
            "{key}={command}: {error}. Write it as a list of words",
            {"command": repr(command), "error": str(error)},
        ) from error
    return command


@dataclass(frozen=True)
class EnvironmentConfig:
    """Section of `reward=environment`: conversations of many turns in place of single responses."""

    kind: Annotated[StrictStr, one_of(ENVIRONMENT_KINDS, or_path="package.module:Class")] = (
        "messages"
    )
    """Who leads the conversation: `messages`, the policy's turns; `endpoint`, an agent.

    `messages`: a class that answers the policy's messages. `endpoint`: a function or a command that
    asks the policy over OpenAI's HTTP interface (docs/environments.md#an-agent-of-your-own). Or a
    class of your own, `path/to/file.py:Class` (docs/environments.md#a-kind-of-your-own).
    """

    factory: UserClass | None = None
    """Class of the environment, `package.module:Class` or `path/to/file.py:Class`.

    `null` means none. One is made for each conversation, as `Class(seed=..., **columns of the row,
    **kwargs)` (docs/environments.md). It gives the prompts and the rewards. With `kind=endpoint` a
    function.
    """

    command: (
        Annotated[StrictStr, AfterValidator(_without_open_quotation)] | tuple[StrictStr, ...] | None
    ) = None
    """With `kind=endpoint` in place of `factory`: a program and its arguments. `null` means none.

    A text is split as a shell does, but there is no shell; or a list of words.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of its constructor, or of an agent."""

    max_turns: Annotated[Integer, Interval(ge=1, le=1000)] = 8
    """Most messages of the policy in a conversation."""

    max_tokens: Count = 1024
    """Most tokens of a conversation, everything included; of one that forked, all its sequences.

    It ends where another response of `length_params.max_length` might not fit.
    """

    unscored: Literal["zero", "mask"] = "zero"
    """Role in training of a conversation that a limit ended before anything of it was scored.

    `zero`: a sample of reward 0, to which `trainer.ppo.improper_end` applies. `mask`: it trains
    nothing. In validation it is wrong and earns 0 with either.
    """

    failed: Literal["retry", "zero"] = "retry"
    """Role of a conversation whose environment or agent raises, dies or is late.

    `retry`: no sample; it begins again. `zero`: a sample of reward 0, whatever it earned before;
    one that fails before the policy said anything begins again in any case.
    """

    timeout_s: Seconds = 60.0
    """Longest wait for one call of an environment, in seconds; then it is killed.

    Of an agent: between an answer of the policy and its next request, or its end.
    """

    total_timeout_s: Seconds = 600.0
    """Longest time of all calls of a conversation together, in seconds."""

    concurrency: Count = 16
    """Conversations under way at the same time, each with a process of its own."""

    memory_mb: Annotated[Integer, Interval(ge=64, le=2**30)] | None = None
    """MiB that a process of an environment, and each that it starts, may allocate.

    `null` means no limit. Beyond that they get a MemoryError, which fails the conversation unless
    the environment handles it. With or without: where the machine's memory runs out, Linux ends
    environments first.
    """

    retries: Annotated[Integer, Interval(ge=0, le=1000)] = 16
    """Failures of environments and of the engine after which a rollout begins conversations again.

    A call of the engine that fails counts once, however many waited for it. With one more failure
    the run stops and names the cause. Those that `failed=zero` makes samples do not count.
    """

    rewritten_history: Literal["fork", "refuse", "keep"] = "fork"
    """Where the chat template shows earlier turns otherwise than they were sampled.

    `fork` goes on with another sequence, the history as the template shows it; the conversation
    remains one sample. `refuse` ends the run; `keep` goes on from the tokens as they were, dropped
    thinking included.
    """

    chat_template: FilePath | None = None
    """Jinja file with a chat template in place of the tokenizer's. `null` means its own.

    The trained model has it, too.
    """

    @property
    def kind_class(self) -> Any:
        """The `aligner.algorithms.rollout.kinds.EnvironmentKind` that ``kind`` names."""
        path = ENVIRONMENT_KINDS.get(self.kind, self.kind)
        return load_function(path, key="environment.kind", kind="class")

    @property
    def is_set(self) -> bool:
        """True if there is an environment."""
        return self.factory is not None or self.command is not None

    @property
    def words(self) -> list[str]:
        """Words of the command; none: there is no command."""
        return (
            shlex.split(self.command) if isinstance(self.command, str) else list(self.command or ())
        )

    @property
    def named(self) -> str:
        """The key that says what it is, with its value."""
        if self.command is not None:
            return f"environment.command={shlex.join(self.words)!r}"
        return f"environment.factory={self.factory}"

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse an environment that its kind cannot run, and limits that leave no room."""
        yield from self.kind_class.problems(key, run)
        if not self.is_set:
            return
        response = run.model.rollout.length_params.max_length
        if self.max_tokens <= response:
            yield (
                f"{key}.max_tokens={self.max_tokens} leaves no room for a prompt before a response "
                f"of {run.model.rollout_key}.length_params.max_length={response}. Raise it"
            )
        if run.data.max_prompt_length is not None:
            yield (
                f"data.max_prompt_length={run.data.max_prompt_length}: prompts are the "
                f"environment's. Set it to null, and bound conversations by {key}.max_tokens"
            )
