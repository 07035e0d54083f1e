"""Environments in TRL's form: a class whose public methods are the tools.

``reset(**columns)`` begins, and what text it returns is put behind the prompt; every other public
method is a tool; ``get_reward()``, where it is there, scores the conversation at its end. A class
without is scored by a reward function of TRL's form; where both are there, they are added
(TRL 1.16: ``environment_factory`` and ``reward_funcs`` of ``GRPOTrainer``). It is not needed.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aligner.data.chat import Message
from aligner.environments.adapters.foreign import (
    PromptedTools,
    check_names,
    loaded,
    prompt_messages,
)
from aligner.environments.calls import Form, parse_calls
from aligner.environments.protocol import Turn
from aligner.errors import ConfigError, DataError

_NO_TOOLS = ("reset", "get_reward")


class TRLEnv(PromptedTools):
    """A class of TRL's form.

    A message without a call ends the conversation and earns what ``get_reward`` returns; messages
    with calls are not scored. Calls of one message are made one after the other, as TRL makes
    those of plain methods; where all tools are coroutines, at the same time.
    """

    def __init__(
        self,
        *,
        seed: int,
        environment: str,
        prompt: str | Sequence[Message] | None = None,
        arguments: Mapping[str, Any] | None = None,
        reward: str | None = None,
        form: Form = "hermes",
        max_tool_calling_iterations: int | None = None,
        **columns: Any,
    ) -> None:
        """Make the class that ``environment`` names and reset it.

        Args:
            seed: given to ``reset`` if it has a parameter of this name.
            environment: ``package.module:Class`` or ``path/to/file.py:Class``.
            prompt: the row's; what ``reset`` returns is put behind its last message.
            arguments: the class's own keyword arguments.
            reward: a reward function of TRL's form; a class without ``get_reward`` needs one.
            form: of calls.
            max_tool_calling_iterations: the conversation ends with the message that would call
                tools once more. None: only the limits of the run end it.
            columns: all others of the row; ``reset`` is given them and ``prompt``.
        """
        self._environment = loaded(environment, "environment")(**(arguments or {}))
        self._reward = None if reward is None else loaded(reward, "reward")
        self._prompt = prompt
        self._columns = columns if prompt is None else {"prompt": prompt, **columns}
        self._left = max_tool_calling_iterations
        tools = tool_methods(self._environment)
        if not all(map(inspect.iscoroutinefunction, tools)):
            self.calls_at_once = 1
        self._completion: list[Message] = []
        messages = prompt_messages(prompt)
        observation = self._reset(seed)
        if observation and messages:
            messages[-1]["content"] += observation
        elif observation:
            messages = prompt_messages(observation)
        super().__init__(messages, [_synchronous(tool) for tool in tools], form)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Refuse a class that is none of TRL's form, before the run begins."""
        check_names(kwargs, "reward")
        name = kwargs.get("environment")
        if name is None:
            return
        found = loaded(name, "environment")
        if not isinstance(found, type):  # a function that makes one
            return
        if not callable(getattr(found, "reset", None)):
            raise ConfigError(f"environment.kwargs.environment={name!r} has no method reset")
        if kwargs.get("reward") is None and not hasattr(found, "get_reward"):
            raise ConfigError(
                f"environment.kwargs.environment={name!r} has no method get_reward; name a reward "
                "function of TRL's form as environment.kwargs.reward"
            )

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Make the calls of a message; one without, or one too many, ends the conversation."""
        self._completion.append(dict(message))
        if self._left is not None and parse_calls(message["content"], self._form):
            if self._left == 0:
                return self.answered(message["content"])
            self._left -= 1
        turn = super().step(message)
        self._completion += [dict(each) for each in turn.messages]
        return turn

    def answered(self, text: str) -> Turn:
        """Score the conversation."""
        del text
        return Turn(reward=self._score(), done=True)

    def _reset(self, seed: int) -> str | None:
        given = dict(self._columns)
        if "seed" in inspect.signature(self._environment.reset).parameters:
            given.setdefault("seed", seed)
        observation = _waited(self._environment.reset(**given))
        if observation is not None and not isinstance(observation, str):
            raise DataError(
                f"reset returned {type(observation).__name__}; TRL's form is text or None"
            )
        return observation

    def _score(self) -> float | None:
        """Sum of what the class and the reward function pay, as TRL's; None: neither does."""
        get_reward = getattr(self._environment, "get_reward", None)
        paid = [
            None if get_reward is None else _waited(get_reward()),
            None if self._reward is None else self._score_by_function(self._reward),
        ]
        numbers = [float(value) for value in paid if value is not None]
        return sum(numbers) if numbers else None

    def _score_by_function(self, function: Callable[..., Any]) -> float | None:
        asked: Any = self._prompt
        alone = isinstance(asked, str)
        completion: Any = self._completion[-1]["content"] if alone else self._completion
        others = {name: [value] for name, value in self._columns.items() if name != "prompt"}
        scores = function(
            prompts=[asked],
            completions=[completion],
            environments=[self._environment],
            **others,
        )
        found: float | None = _waited(scores)[0]
        return found


def tool_methods(environment: Any) -> list[Callable[..., Any]]:
    """The methods of an object that TRL would offer as tools, in the order of their names."""
    return [
        getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)  # no properties
        if not name.startswith("_") and name not in _NO_TOOLS
    ]


def _synchronous(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that waits for its coroutine; signature and docstring stay."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _waited(method(*args, **kwargs))

    return call


def _waited(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())
