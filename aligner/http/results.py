"""Results of a job on their way from the model's thread to the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException

from aligner.http.queue import ENDING, Job

Result = TypeVar("Result")
_CLIENT_LEFT = 499  # a status that nobody reads


class Results(Generic[Result]):
    """Results of one job; made within the event loop. `put` is the job's ``report``."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Result | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Result | Exception) -> None:
        """Add a result, or the error in place of all that are missing; in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    @contextlib.contextmanager
    def needing(self, request: Request) -> Iterator[None]:
        """End the wait if the sender of ``request``, whose body was read, leaves in the block."""

        async def report_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self._events.put_nowait(HTTPException(_CLIENT_LEFT, "the client has left"))

        watch = asyncio.create_task(report_disconnect())
        try:
            yield
        finally:
            watch.cancel()

    async def of(
        self,
        job: Job[Any],
        deadline: float,
        too_late: str,
        is_last: Callable[[Result], bool] = lambda result: True,
    ) -> AsyncIterator[Result]:
        """Results of ``job`` until all its items have ended; nobody waits for it afterwards.

        Args:
            job: a job that was queued.
            deadline: all must have ended by then, in the event loop's time.
            too_late: message if they have not.
            is_last: whether a result ends its item.

        Raises:
            HTTPException: 500, the model failed; 503, the deadline passed or the server is ending.
        """
        missing = len(job.items)
        try:
            while missing:
                async with asyncio.timeout_at(deadline):
                    event = await self._events.get()
                if isinstance(event, HTTPException):
                    raise event
                if isinstance(event, ConnectionAbortedError):
                    raise HTTPException(503, str(event))
                if isinstance(event, Exception):
                    cause = f"{type(event).__name__}: {event}"
                    raise HTTPException(500, f"the model failed: {cause}")
                missing -= is_last(event)
                yield event
        except TimeoutError as error:
            raise HTTPException(503, too_late) from error
        except asyncio.CancelledError as error:
            raise HTTPException(503, ENDING) from error
        finally:
            job.is_left = True
