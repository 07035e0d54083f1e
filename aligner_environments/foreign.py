"""Helpers of adapters: optional packages, messages and event loops."""

import asyncio
import importlib
import json
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from aligner.data.chat import Message
from aligner.environments.functions import loaded
from aligner.errors import ConfigError, raised_as

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
