"""Environments of gymnasium: observations become text, messages become actions.

By default an observation is shown as text or as JSON. An action is the last number of a message
(`Discrete` spaces), the last name of ``actions`` in it, or the message itself (`Text` spaces). The
user's functions ``observation`` and ``action`` replace these defaults.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aligner.environments.functions import loaded
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError, raised_as
from aligner_environments.foreign import as_text, check_names, imported, user_message

_INTEGER = re.compile(r"-?\d+")
_HIGHLIGHT = re.compile(r"\x1b\[(?!0m)[\d;]+m(.*?)\x1b\[0m", re.S)
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
Parser = Callable[[str], Any]


class GymnasiumEnv:
    """An environment of ``gymnasium.make``.

    A message is an action, and its reward is the reward of the step. After a message without an
    action, the environment does not step and answers with the format of actions.
    """

    def __init__(
        self,
        *,
        seed: int,
        id: str,
        make: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        instructions: str | None = None,
        actions: Sequence[str] | None = None,
        action: str | None = None,
        observation: str | None = None,
        invalid_reward: float = 0.0,
        **columns: Any,
    ) -> None:
        """Make the environment. docs/environments_adapters.md describes the arguments."""
        del columns
        gymnasium = imported("gymnasium", "gymnasium")
        self._is_rendered = observation == "render"
        mode = {"render_mode": "ansi"} if self._is_rendered else {}
        self._env = gymnasium.make(id, **{**mode, **(make or {})})
        self._seed, self._options = seed, None if options is None else dict(options)
        self._instructions, self._invalid_reward = instructions, float(invalid_reward)
        self._parse, self._help = action_parser(self._env.action_space, actions, action)
        self._text_of = None
        if observation is not None and not self._is_rendered:
            self._text_of = loaded(observation, "observation")

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if an argument is invalid."""
        gymnasium = imported("gymnasium", "gymnasium")
        check_names(kwargs, "action")
        if kwargs.get("observation") != "render":
            check_names(kwargs, "observation")
        if "id" not in kwargs:
            return
        key = f"environment.kwargs.id={kwargs['id']!r}"
        with raised_as(ConfigError, key, gymnasium.error.Error):
            cls(seed=0, **kwargs).close()

    def init(self) -> Start:
        """Reset the environment and show the first observation."""
        observation, info = self._env.reset(seed=self._seed, options=self._options)
        head = self._help if self._instructions is None else self._instructions
        return Start(user_message(head, self._text(observation, info)))

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Take the action of a message."""
        action = self._parse(message["content"])
        if action is None:
            remedy = self._help or "There is no action in this message."
            return Turn(user_message(remedy), self._invalid_reward, info={"invalid": True})
        observation, reward, terminated, truncated, info = self._env.step(action)
        return Turn(
            user_message(self._text(observation, info)),
            float(reward),
            done=bool(terminated or truncated),
            info={**info, "truncated": bool(truncated)},
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _text(self, observation: Any, info: Mapping[str, Any]) -> str:
        if self._is_rendered:
            return without_colours(str(self._env.render()))
        if self._text_of is not None:
            return str(self._text_of(observation, info))
        return as_text(observation)


def action_parser(
    space: Any, names: Sequence[str] | None = None, function: str | None = None
) -> tuple[Parser, str]:
    """Return a parser of messages for ``space``, and the text that asks for an action.

    The parser returns None for a message without an action. Raises `ConfigError` if the space needs
    a user's function, or if the number of ``names`` is not the number of actions.
    """
    if function is not None:
        parse = loaded(function, "action")
        return lambda text: parse(text, space), ""
    # Text spaces, and spaces that need a function.
    kind = type(space).__name__
    if kind == "Text":
        return lambda text: text.strip() if space.contains(text.strip()) else None, ""
    if kind != "Discrete":
        raise ConfigError(
            f"environment.kwargs.id: its actions are {space}, and only Discrete and Text spaces "
            "have a default parser of messages. Set a function (text, space) -> action as "
            "environment.kwargs.action"
        )
    # Discrete spaces: numbers, or names of the actions.
    first, count = int(space.start), int(space.n)
    if names is None:
        last = first + count - 1

        def action_of(digits: str) -> int | None:
            return int(digits) if len(digits) <= 18 and first <= int(digits) <= last else None

        return (_last_match(_INTEGER, action_of), f"Answer with a number from {first} to {last}.")
    if len(names) != count:
        raise ConfigError(
            f"environment.kwargs.actions={list(names)} has {len(names)} names, and the "
            f"environment {count} actions"
        )
    numbers = {name.lower(): first + index for index, name in enumerate(names)}
    longest_first = map(re.escape, sorted(numbers, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)({'|'.join(longest_first)})(?!\w)", re.I)
    parse_name = _last_match(pattern, lambda name: numbers[name.lower()])
    return parse_name, f"Answer with one of: {', '.join(names)}."


def without_colours(text: str) -> str:
    """Return a terminal's text without colours, with highlighted text in brackets."""
    return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", text)).strip("\n")


def _last_match(pattern: re.Pattern[str], action_of: Callable[[str], int | None]) -> Parser:
    def parse(text: str) -> int | None:
        matches = pattern.findall(text)
        return action_of(matches[-1]) if matches else None

    return parse
