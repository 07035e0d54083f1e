"""Packages and classes of others: found when they are needed, named where they are missing."""

import asyncio
import importlib
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from aligner.data.chat import Message
from aligner.environments.calls import Form
from aligner.environments.protocol import Start
from aligner.environments.tools import ToolEnv
from aligner.errors import ConfigError, DataError
from aligner.importing import load_function

_LONGEST_CLOSE_S = 10.0


def imported(module: str, package: str) -> Any:
    """The module of an optional package.

    Raises:
        ConfigError: it, or something that it needs, is not installed; with the command for it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs the package {package} ({error}); install it beside aligner: "
            f"pip install {package}"
        ) from error


def loaded(name: str, key: str) -> Any:
    """The class or function that ``environment.kwargs`` names under ``key``."""
    return load_function(name, key=f"environment.kwargs.{key}")


def prompt_messages(prompt: str | Sequence[Message] | None) -> list[Message]:
    """A row's prompt as messages: text is the user's one message; None: there are none."""
    if not prompt:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def user_message(*texts: str | None) -> list[Message]:
    """The user's one message, of the texts that are not empty, each on a line."""
    return [{"role": "user", "content": "\n".join(filter(None, texts))}]


def check_names(kwargs: Mapping[str, Any], *keys: str) -> None:
    """Refuse values of ``keys`` that name nothing that can be imported."""
    for key in keys:
        if kwargs.get(key) is not None:
            loaded(kwargs[key], key)


def as_text(observation: Any) -> str:
    """Text as it is; whatever else as JSON, arrays as lists."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_plain(observation), default=str)


class PromptedTools(ToolEnv):
    """Tools beside a prompt of the data, of which the last message is the user's."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Callable[..., Any]],
        form: Form,
    ) -> None:
        """Offer these functions after these messages."""
        super().__init__(tools, form)
        if not messages or messages[-1]["role"] != "user":
            raise DataError(
                "the conversation begins with no message of the user's; give the data a column "
                "prompt: text, or messages of which the last is the user's"
            )
        self.messages = list(messages)

    def question(self) -> str:
        """The user's last message."""
        return str(self.messages[-1]["content"])

    def init(self) -> Start:
        """The prompt, with the tools shown."""
        start = super().init()
        return Start([*self.messages[:-1], *start.messages], start.tools)


class LoopThread:
    """An event loop in a thread of its own, for coroutines that go on between calls."""

    def __init__(self) -> None:
        """Start the thread; it ends with the process."""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._holders: list[Future[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Result of a coroutine; any thread may ask, several at the same time."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Begin a coroutine and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def enter(self, context: AbstractAsyncContextManager[Any]) -> Any:
        """Enter a context that one task holds until `close`: some must be left where entered."""
        entered: Future[Any] = Future()
        self._holders.append(self.start(self._hold(context, entered)))
        return entered.result()

    def close(self) -> None:
        """Leave the contexts and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        try:
            for holder in self._holders:
                holder.result(_LONGEST_CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_LONGEST_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _hold(
        self, context: AbstractAsyncContextManager[Any], entered: "Future[Any]"
    ) -> None:
        try:
            async with context as value:
                entered.set_result(value)
                await self._closing.wait()
        except BaseException as error:
            if entered.done():
                raise
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            entered.set_exception(error)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
