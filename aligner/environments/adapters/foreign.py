"""Helpers of adapters: optional packages, users' classes, messages and event loops."""

import asyncio
import importlib
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from aligner.data.chat import MESSAGES, Message
from aligner.environments.calls import Form
from aligner.environments.protocol import Start, Turn
from aligner.environments.tools import ToolEnv
from aligner.errors import ConfigError, DataError, raised_as
from aligner.importing import load_function
from aligner.rewards.function.execution import LoadedFunction
from aligner.rewards.protocol import Samples

_MAX_CLOSE_S = 10.0


def imported(module: str, package: str) -> Any:
    """Import a module of an optional package.

    Raises:
        ConfigError: the package or one of its requirements is not installed. The message contains
            the command to install it.
    """
    remedy = f"install it in aligner's environment: pip install {package}"
    text = f"this environment needs the package {package}"
    with raised_as(ConfigError, text, ImportError, remedy=remedy):
        return importlib.import_module(module)


def loaded(name: str, key: str) -> Any:
    """Load the class or function that ``environment.kwargs`` names under ``key``."""
    return load_function(name, key=f"environment.kwargs.{key}")


def prompt_messages(prompt: str | Sequence[Message] | None) -> list[Message]:
    """Return a row's prompt as messages. Text becomes a user message, None an empty list."""
    if not prompt:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def user_message(*texts: str | None) -> list[Message]:
    """Return a user message of the texts that are not empty, each on a line."""
    return [{"role": "user", "content": "\n".join(filter(None, texts))}]


def check_names(kwargs: Mapping[str, Any], *keys: str) -> None:
    """Raise `ConfigError` if a value of ``keys`` in ``kwargs`` cannot be imported."""
    for key in keys:
        if kwargs.get(key) is not None:
            loaded(kwargs[key], key)


def as_text(observation: Any) -> str:
    """Return text unchanged. Return any other observation as JSON, with arrays as lists."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_plain(observation), default=str)


class PromptedTools(ToolEnv):
    """Base of environments with tools that begin with a prompt of the data.

    The prompt's last message must be a user message.
    """

    explains_calls = True

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Callable[..., Any]], form: Form
    ) -> None:
        """Offer ``tools`` after ``messages``."""
        super().__init__(tools, form)
        if not messages or messages[-1]["role"] != "user":
            raise DataError(
                "the conversation begins with no user message. Give the data a column prompt: "
                "text, or messages that end with a user message"
            )
        self.messages = list(messages)

    def question(self) -> str:
        """Return the user's last message."""
        return str(self.messages[-1]["content"])

    def init(self) -> Start:
        """Return the prompt with the tools."""
        start = super().init()
        return Start([*self.messages[:-1], *start.messages], start.tools)


class ScoredTools(PromptedTools):
    """Base of environments with tools whose answers, messages without a call, a function scores.

    Messages with calls are not scored.
    """

    def __init__(
        self,
        prompt: str | Sequence[Message],
        tools: Sequence[Callable[..., Any]],
        form: Form,
        scorer: LoadedFunction | None,
        ground_truth: Any,
        columns: Mapping[str, Any],
    ) -> None:
        """Offer ``tools`` after ``prompt``. ``columns``: other columns, for the reward function."""
        self._scorer, self._truth, self._columns = scorer, ground_truth, columns
        super().__init__(prompt_messages(prompt), tools, form)

    @classmethod
    def check_reward(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if ``environment.kwargs`` has no usable reward function."""
        if scorer_of(kwargs.get("reward"), kwargs.get("reward_kwargs")) is not None:
            return
        if cls.answered is ScoredTools.answered:
            raise ConfigError(
                "environment.kwargs.reward is not set, and tools return no reward. Set a reward "
                "function, such as aligner.examples.tasks.exact_number:reward"
            )

    def answered(self, text: str) -> Turn:
        """Score the answer."""
        if self._scorer is None:
            return Turn(done=True)
        # An environment does not know whether its message was cut.
        columns = {"is_end": True, MESSAGES: self.messages, **self._columns}
        rewards, parts = self._scorer.score(
            Samples(
                [self.question()],
                [text],
                [self._truth],
                {name: [value] for name, value in columns.items()},
            )
        )
        metrics = {name: values[0] for name, values in parts.items()}
        return Turn(reward={"reward": rewards[0], **metrics}, done=True)


def scorer_of(reward: str | None, kwargs: Mapping[str, Any] | None) -> LoadedFunction | None:
    """Load a reward function. Its arguments and forms are those of ``reward.function``."""
    if reward is None:
        return None
    return LoadedFunction(loaded(reward, "reward"), reward, kwargs or {})


class LoopThread:
    """An event loop in a separate thread, for coroutines that run between calls.

    callers' threads ─► coroutines ─► the loop's thread
                                      a task per context: enter ─► wait for `close` ─► exit
    """

    def __init__(self) -> None:
        """Start the thread, a daemon."""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._context_tasks: list[Future[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and return its result. Thread-safe."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Start a coroutine without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def enter(self, context: AbstractAsyncContextManager[Any]) -> Any:
        """Enter a context until `close`. One task enters and exits, as some contexts require."""
        value: Future[Any] = Future()
        self._context_tasks.append(self.start(self._within(context, value)))
        return value.result()

    def close(self) -> None:
        """Exit the contexts and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        try:
            for task in self._context_tasks:
                task.result(_MAX_CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_MAX_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _within(
        self, context: AbstractAsyncContextManager[Any], value: "Future[Any]"
    ) -> None:
        try:
            async with context as entered_value:
                value.set_result(entered_value)
                await self._closing.wait()
        except BaseException as error:
            if value.done():
                raise
            # Task groups wrap errors, which hides the cause from users.
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            value.set_exception(error)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
