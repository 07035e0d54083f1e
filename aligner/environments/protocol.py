"""The protocol of an environment, and the checks of what one returns.

This module imports neither torch nor numpy: it is loaded by every environment's process.
"""

import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from aligner.data.chat import Message, parse_messages
from aligner.errors import DataError
from aligner.plain import plain, shown

Reward = float | None | Mapping[str, float | None]
_LARGEST = 3.4e38  # float32


@dataclass(frozen=True)
class Start:
    """Beginning of a conversation.

    ``messages``: ``{"role": text, "content": text}`` each, the last not the assistant's.
    ``tools``: JSON schemas of functions, for the tokenizer's chat template.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Turn:
    """Answer of an environment to a message of the policy.

    ``messages``: what the policy reads next; none are needed where ``done``, and those there are
    go to samples only. ``reward``: of the policy's message; None: it is not scored, which is not 0.
    A mapping has ``reward`` and further numbers, which become metrics: their sums over the
    conversation, and of ``accuracy``, the verdict from 0 to 1, the last. Those that are not finite
    are left out.
    ``done``: the conversation is over. ``info``: kept with the sample. ``steps``: rewards of parts
    of the message, ``(end, reward)`` each, beside that of the whole; ``end`` is the number of its
    characters up to the end of the part.
    """

    messages: Sequence[Message] = ()
    reward: Reward = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[tuple[int, float]] = ()

    @property
    def score(self) -> float | None:
        """The reward by itself; None: the message is not scored."""
        found = self.reward.get("reward") if isinstance(self.reward, Mapping) else self.reward
        return None if found is None else float(found)

    @property
    def parts(self) -> dict[str, float]:
        """Further numbers of a reward that is a mapping."""
        if not isinstance(self.reward, Mapping):
            return {}
        return {
            name: float(value)
            for name, value in self.reward.items()
            if name != "reward" and value is not None
        }


class MessageEnv(Protocol):
    """An environment that speaks in chat messages; one is made for each conversation.

    ``Class(seed=..., **columns of the data's row, **environment.kwargs)`` makes it. The methods may
    be coroutines or plain functions; ``close`` may be missing. A class method
    ``check_kwargs(kwargs)``, where there is one, refuses ``environment.kwargs`` before the run
    begins, by an `AlignerError`.
    """

    def init(self) -> Start | Awaitable[Start]:
        """Begin the conversation."""
        ...

    def step(self, message: Message) -> Turn | Awaitable[Turn]:
        """Answer the policy's message, ``{"role": "assistant", "content": text}``.

        The text is what was sampled, without the token that ended it; a message that was cut by the
        length limit comes as it is.
        """
        ...

    def close(self) -> Awaitable[None] | None:
        """Give back what the conversation held."""
        ...


def check_start(value: Any) -> Start:
    """``value``, of plain classes only; DataError where it is no beginning."""
    if not isinstance(value, Start):
        raise DataError(f"init returned {shown(value)}; it must return a Start")
    tools = None
    if value.tools is not None:
        if not all(isinstance(tool, Mapping) for tool in value.tools):
            raise DataError(f"tools must be JSON schemas, got {shown(value.tools)}")
        tools = plain(list(value.tools)) or None
    return Start(plain(parse_messages(list(value.messages))), tools)


def check_turn(value: Any, characters: int = 0) -> Turn:
    """``value``, of plain classes only; DataError where it is no answer.

    ``characters``: of the policy's message; where there are none it has no steps.
    """
    if not isinstance(value, Turn):
        raise DataError(f"step returned {shown(value)}; it must return a Turn")
    if not value.messages and not value.done:
        raise DataError(
            "step returned neither a message nor done=True; the policy has nothing to answer"
        )
    reward: Reward = None
    if isinstance(value.reward, Mapping):
        if "reward" not in value.reward:
            raise DataError(f"the reward {dict(value.reward)} has no key 'reward'")
        reward = {
            str(name): _number(each, str(name), is_part=name != "reward")
            for name, each in value.reward.items()
        }
        accuracy = reward.get("accuracy")
        if accuracy is not None and not 0 <= accuracy <= 1:
            raise DataError(
                f"accuracy is {accuracy:g}; it is a share, from 0 to 1, and the last one that a "
                "conversation reports is its verdict: give other numbers another name"
            )
    else:
        reward = _number(value.reward, "reward")
    messages = plain(parse_messages(list(value.messages))) if value.messages else []
    info = plain(
        {name: each if _is_single(each) else shown(each) for name, each in value.info.items()}
    )
    steps = tuple(_step(each, characters) for each in value.steps)
    return Turn(messages, reward, bool(value.done), info, steps)


def check_total(rewards: Iterable[float | None]) -> None:
    """Refuse rewards of a conversation whose sums may not be finite in float32 (DataError)."""
    total = math.fsum(abs(reward) for reward in rewards if reward is not None)
    if total > _LARGEST:
        raise DataError(f"the rewards of the conversation add up to {total:g}, beyond float32")


def _step(value: Any, characters: int) -> tuple[int, float]:
    try:
        end, reward = value
        if isinstance(end, bool) or int(end) != end or not 0 < end <= characters:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"steps has {shown(value)}; a step is (end, reward), and its end a number of "
            f"characters from 1 to the message's {characters}"
        ) from None
    number = _number(reward, "the reward of a step")
    if number is None:
        raise DataError(f"the step that ends at {end} has no reward; leave it out of steps")
    return int(end), number


def _number(value: Any, name: str, *, is_part: bool = False) -> float | None:
    """``value`` as a float; a part of a reward that is not finite in float32 is left out (None)."""
    if value is None:
        return None
    value = value.value if isinstance(value, Enum) else value
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise DataError(f"{name} is {shown(value)}, which is no number") from None
    if not math.isfinite(number) or abs(number) > _LARGEST:
        if is_part:
            return None
        raise DataError(f"{name} is {number}; it must be finite in float32")
    return number


def _is_single(value: Any) -> bool:
    """True of what `plain` makes one value of; ``info`` keeps the ``repr`` of all else."""
    is_scalar = getattr(value, "shape", None) == ()
    return value is None or is_scalar or isinstance(value, bool | int | float | str | Enum)
