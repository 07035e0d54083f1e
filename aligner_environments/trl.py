"""Environments in TRL's form: a class whose public methods are the tools.

``reset(**columns)`` begins the conversation, and the text that it returns is appended to the
prompt. Every other public method is a tool. An optional ``get_reward()`` scores the conversation at
its end, and a reward function of TRL's form is added to it or replaces it (TRL 1.16:
``environment_factory`` and ``reward_funcs`` of ``GRPOTrainer``). TRL itself is not needed.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aligner.data.chat import Message
from aligner.environments.calls import Form, parse_calls
from aligner.environments.functions import PromptedTools, loaded, prompt_messages
from aligner.environments.protocol import Turn
from aligner.errors import ConfigError, DataError
from aligner_environments.foreign import check_names

_OTHER_METHODS = ("reset", "get_reward")  # public methods that are not tools


class TRLEnv(PromptedTools):
    """Environment of a class that TRL's `GRPOTrainer` accepts as ``environment_factory``.

    A message without a call ends the conversation and gets the reward of ``get_reward``. Messages
    with calls are not scored. The calls of a message are executed in order or, if all tools are
    coroutines, at the same time, as in TRL.
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
        """Create an object of the class that ``environment`` names, and reset it.

        docs/environments_adapters.md describes the arguments.
        """
        self._environment = loaded(environment, "environment")(**(arguments or {}))
        self._reward = None if reward is None else loaded(reward, "reward")
        self._prompt = prompt
        self._columns = columns if prompt is None else {"prompt": prompt, **columns}
        self._remaining_iterations = max_tool_calling_iterations
        # TRL executes calls concurrently only if all tools are coroutines.
        tools = tool_methods(self._environment)
        if not all(map(inspect.iscoroutinefunction, tools)):
            self.calls_at_once = 1
        self._completion: list[Message] = []
        # The text that `reset` returns follows the prompt.
        messages = prompt_messages(prompt)
        observation = self._reset(seed)
        if observation and messages:
            messages[-1]["content"] += observation
        elif observation:
            messages = prompt_messages(observation)
        super().__init__(messages, list(map(_synchronous, tools)), form)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if the class lacks the methods that TRL needs."""
        check_names(kwargs, "reward")
        name = kwargs.get("environment")
        if name is None:
            return
        environment_class = loaded(name, "environment")
        if not isinstance(environment_class, type):  # a function that creates the object
            return
        if not callable(getattr(environment_class, "reset", None)):
            raise ConfigError(f"environment.kwargs.environment={name!r} has no method reset")
        if kwargs.get("reward") is None and not hasattr(environment_class, "get_reward"):
            raise ConfigError(
                f"environment.kwargs.environment={name!r} has no method get_reward. Set a reward "
                "function of TRL's form as environment.kwargs.reward"
            )

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Execute the calls of a message. Without calls, or at the limit, end the conversation."""
        self._completion.append(dict(message))
        remaining = self._remaining_iterations
        if remaining is not None and parse_calls(message["content"], self._form):
            if remaining == 0:
                return self.answered(message["content"])
            self._remaining_iterations = remaining - 1
        turn = super().step(message)
        self._completion += [dict(result) for result in turn.messages]
        return turn

    def answered(self, text: str) -> Turn:
        """Score the conversation."""
        del text
        return Turn(reward=self._score(), done=True)

    def _reset(self, seed: int) -> str | None:
        arguments = dict(self._columns)
        if "seed" in inspect.signature(self._environment.reset).parameters:
            arguments.setdefault("seed", seed)
        observation = _result_of(self._environment.reset(**arguments))
        if observation is not None and not isinstance(observation, str):
            raise DataError(
                f"reset returned {type(observation).__name__}. TRL's form is text or None"
            )
        return observation

    def _score(self) -> float | None:
        """Return the sum of the class's and the reward function's reward. None if both are."""
        rewards = []
        if hasattr(self._environment, "get_reward"):
            rewards.append(_result_of(self._environment.get_reward()))
        if self._reward is not None:
            # As in TRL, a prompt that is text has a completion that is text.
            is_text = isinstance(self._prompt, str)
            completion: Any = self._completion[-1]["content"] if is_text else self._completion
            columns = {name: [value] for name, value in self._columns.items() if name != "prompt"}
            columns |= {"prompts": [self._prompt], "completions": [completion]}
            scores = self._reward(environments=[self._environment], **columns)
            rewards.append(_result_of(scores)[0])
        numbers = [float(reward) for reward in rewards if reward is not None]
        return sum(numbers) if numbers else None


def tool_methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the methods of an object that TRL would offer as tools, sorted by name."""
    return [
        getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)  # no properties
        if not name.startswith("_") and name not in _OTHER_METHODS
    ]


def _synchronous(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method to wait for its coroutine, with the same signature and docstring."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _result_of(method(*args, **kwargs))

    return call


def _result_of(value: Any) -> Any:
    """Return ``value``, or its result if it is a coroutine."""
    return asyncio.run(asyncio.wait_for(value, None)) if inspect.isawaitable(value) else value
