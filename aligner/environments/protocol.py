"""The protocol of an environment, and checks of the values that environments return.

Every environment's process loads this module, so it imports neither torch nor numpy.
"""

import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from aligner.data.chat import Message, parse_messages
from aligner.errors import ConfigError, DataError, raised_as
from aligner.plain import as_float32, plain, shown

Reward = float | None | Mapping[str, float | None]
FailureKind = Literal["raised", "fault", "final"]  # see `aligner.environments.worker`
_MAX_FLOAT32 = 3.4e38


@dataclass(frozen=True)
class Start:
    """Start of a conversation.

    ``messages``: list of ``{"role": text, "content": text}``. The last message must not be the
    assistant's. ``tools``: JSON schemas of functions, passed to the tokenizer's chat template.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Turn:
    """Answer of an environment to a message of the policy.

    ``messages``: messages that the policy reads next. If ``done``, they are optional and only
    stored with the sample.
    ``reward``: reward of the policy's message. None means that the message is not scored, which
    differs from 0. A mapping contains ``reward`` and additional metrics. All values are finite.
    Metrics are summed over the conversation. ``accuracy``, from 0 to 1, is not summed: the last
    value is the verdict on the conversation.
    ``done``: True if the conversation is over.
    ``info``: mapping that is stored with the sample.
    ``steps``: rewards for parts of the message, in addition to ``reward``, as pairs
    ``(end, reward)``. ``end`` is the number of characters from the start of the message to the end
    of the part.
    """

    messages: Sequence[Message] = ()
    reward: Reward = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[tuple[int, float]] = ()

    @property
    def score(self) -> float | None:
        """The reward without metrics, None if the message is not scored."""
        score = self.reward.get("reward") if isinstance(self.reward, Mapping) else self.reward
        return None if score is None else float(score)

    @property
    def parts(self) -> dict[str, float]:
        """The additional metrics in ``reward``, empty if ``reward`` is not a mapping."""
        items = self.reward.items() if isinstance(self.reward, Mapping) else ()
        return {
            name: float(value) for name, value in items if name != "reward" and value is not None
        }


class MessageEnv(Protocol):
    """An environment that answers the policy's chat messages. Each conversation has an instance.

    The run calls ``Class(seed=..., **columns of the data's row, **environment.kwargs)``. Methods
    are coroutines or plain functions. ``close`` is optional. An optional class method
    ``check_kwargs(kwargs)`` raises an exception if ``environment.kwargs`` is not usable. The run
    calls it before it loads a model.
    """

    def init(self) -> Start | Awaitable[Start]:
        """Begin the conversation."""
        ...

    def step(self, message: Message) -> Turn | Awaitable[Turn]:
        """Answer the policy's message, ``{"role": "assistant", "content": text}``.

        The text has no end token, and the length limit may have cut it.
        """
        ...

    def close(self) -> Awaitable[None] | None:
        """Release the resources of the conversation."""
        ...


def check_start(value: Any) -> Start:
    """Return a `Start` that contains built-in types only. Raises `DataError` if it is invalid."""
    if not isinstance(value, Start):
        raise DataError(f"init returned {shown(value)}; it must return a Start")
    tools = list(value.tools or ())
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"Start.tools must be a list of JSON schemas, got {shown(value.tools)}")
    return Start(plain(parse_messages(list(value.messages))), plain(tools) or None)


def check_turn(value: Any, characters: int = 0) -> Turn:
    """Return a `Turn` that contains built-in types only.

    ``characters``: length of the policy's message, the maximum ``end`` of a step. Raises
    `ConfigError` if ``value`` is no `Turn`, or lacks a value, or has a value of a wrong type.
    Raises `DataError` for an invalid number.
    """
    if not isinstance(value, Turn):
        raise ConfigError(f"step returned {shown(value)}; it must return a Turn")
    if not value.messages and not value.done:
        raise ConfigError(
            "step returned neither a message nor done=True. Return a message for the policy to "
            "answer, or done=True to end the conversation"
        )
    # The reward, and its metrics.
    items = value.reward if isinstance(value.reward, Mapping) else {"reward": value.reward}
    if "reward" not in items:
        raise ConfigError(
            f"the reward {dict(items)} has no key 'reward'. Add a number, or None for no score"
        )
    numbers = {
        str(name): _number(number, str(name), is_metric=name != "reward")
        for name, number in items.items()
    }
    accuracy = numbers.get("accuracy")
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise DataError(
            f"accuracy is {accuracy:g}. It must be from 0 to 1, because the last accuracy in a "
            "conversation is the verdict on it. Give other metrics another name"
        )
    reward = numbers if isinstance(value.reward, Mapping) else numbers["reward"]
    # Messages, and info with the ``repr`` of all values except scalars.
    with raised_as(ConfigError, "the messages of step", DataError):
        messages = plain(parse_messages(list(value.messages))) if value.messages else []
    info = {name: item if _is_scalar(item) else shown(item) for name, item in value.info.items()}
    steps = tuple(_step(step, characters) for step in value.steps)
    return Turn(messages, reward, bool(value.done), plain(info), steps)


def check_total(rewards: Iterable[float | None]) -> None:
    """Raise `DataError` if the sum of the absolute ``rewards`` is not finite in float32."""
    total = math.fsum(abs(reward or 0.0) for reward in rewards)
    if total > _MAX_FLOAT32:
        text = f"the rewards of the conversation add up to {total:g}, beyond float32"
        raise DataError(f"{text}. Return smaller rewards")


def _is_scalar(value: Any) -> bool:
    has_no_dimension = getattr(value, "shape", None) == ()
    return value is None or has_no_dimension or isinstance(value, bool | int | float | str | Enum)


def _step(value: Any, characters: int) -> tuple[int, float]:
    try:
        end, reward = value
        if isinstance(end, bool) or int(end) != end or not 0 < end <= characters:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"steps has {shown(value)}. A step must be (end, reward), with an end from 1 to "
            f"{characters}, the number of characters of the message"
        ) from None
    number = _number(reward, "the reward of a step")
    if number is None:
        raise DataError(f"the step that ends at {end} has no reward. Leave it out of steps")
    return int(end), number


def _number(value: Any, name: str, *, is_metric: bool = False) -> float | None:
    """Return ``value`` as a float. Returns None for None, and for a metric that is not finite."""
    if value is None:
        return None
    is_text = isinstance(value, str | bytes)
    error = ConfigError if is_text else DataError
    number = as_float32(value, name, error, may_be_infinite=is_metric)
    return number if math.isfinite(number) else None
