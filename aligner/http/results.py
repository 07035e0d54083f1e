"""Results of a job, passed from the model's thread to the event loop.

model's thread ── put ──► Results ── of ──► request
                             ▲
disconnected client ─────────┘ while_connected
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException

from aligner.http.queue import ENDING, Job

Result = TypeVar("Result")
_DISCONNECTED = 499  # a status for a client that no longer reads


class Results(Generic[Result]):
    """Results of one job, for a coroutine. `put` must be the job's function ``report``."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Result | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Result | Exception) -> None:
        """Add a result, or an error in place of all missing results. Thread-safe."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    @contextlib.contextmanager
    def while_connected(self, request: Request) -> Iterator[None]:
        """Context manager in which `of` raises if the client disconnects. Read its body first."""

        async def report_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self._events.put_nowait(HTTPException(_DISCONNECTED, "the client has left"))

        watch = asyncio.create_task(report_disconnect())
        try:
            yield
        finally:
            watch.cancel()

    async def of(
        self,
        job: Job[Any],
        deadline: float,
        timeout_message: str,
        is_last: Callable[[Result], bool] = lambda result: True,
    ) -> AsyncIterator[Result]:
        """Yield the results of a job until all its items have ended. Finally abandon the job.

        ``deadline``: time limit by the event loop's clock. ``timeout_message``: cause of the error
        after the deadline. ``is_last``: whether a result is the last of its item. Raises
        `HTTPException`: 499 if the client disconnected, 500 if the model failed, 503 after the
        deadline or when the server ends.
        """
        open_items = len(job.items)
        try:
            while open_items:
                async with asyncio.timeout_at(deadline):
                    event = await self._events.get()
                if isinstance(event, HTTPException):  # the client has disconnected
                    raise event
                if isinstance(event, ConnectionAbortedError):  # the server ends
                    raise HTTPException(503, str(event))
                if isinstance(event, Exception):
                    cause = f"the model failed: {type(event).__name__}: {event}"
                    raise HTTPException(500, cause)
                if is_last(event):
                    open_items -= 1
                yield event
        except (TimeoutError, asyncio.CancelledError) as error:
            is_late = isinstance(error, TimeoutError)
            raise HTTPException(503, timeout_message if is_late else ENDING) from error
        finally:
            job.is_abandoned = True
