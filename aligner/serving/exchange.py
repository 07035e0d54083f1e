"""One request and its answer: from the event loop to the engine's thread and back."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Message as AsgiMessage
from starlette.types import Send

from aligner.http.listening import ARRIVAL_S, disconnected
from aligner.serving.answers import Answer
from aligner.serving.queue import Job, Progress, Row, Waiting

ENDING = "the server is ending; try again later"
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
_LEFT = 499  # a status that nobody reads


def refusal(status: int, cause: str) -> dict[str, Any]:
    """Body of a refusal as OpenAI's interface has it; ``param``: the key that is at fault."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    key, colon, _ = cause.partition(":")
    names_key = bool(colon) and status == 400 and key.replace(".", "").replace("_", "").isalnum()
    param = key if names_key else None
    return {"error": {"message": cause, "type": kind, "param": param, "code": _CODES.get(status)}}


class Exchange:
    """Has a request answered; made within the event loop.

    Args:
        waiting: where it waits for the engine.
        rows: what is asked, a row for each choice of ``answer``.
        answer: writes what comes.
        timeout_s: the answer must be complete within so long, from ``began`` on.
        began: when the request had arrived, by the event loop's clock.
        ended: called once, with True when it is, with False when it never will be.

    ``job``: the request as the engine sees it.
    """

    def __init__(
        self,
        waiting: Waiting,
        rows: Sequence[Row],
        answer: Answer,
        timeout_s: float,
        began: float,
        ended: Callable[[bool], None],
    ) -> None:
        self._waiting, self._answer, self._timeout_s = waiting, answer, timeout_s
        self._began, self._ended = began, ended
        self._events: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.job = Job(rows, self._tell)

    async def response(self, request: Request, *, stream: bool) -> Response:
        """The answer, whole or as server-sent events.

        Raises:
            HTTPException: 413 or 429, there is no room for it; 500 or 503, it failed.
        """
        if not self._waiting.add(self.job):
            self._leave()
            raise HTTPException(429, "too many requests are waiting; try again later")
        if stream:
            return _Events(self._pieces(), media_type="text/event-stream")
        watch = asyncio.create_task(disconnected(request))
        watch.add_done_callback(lambda _: self._events.put_nowait(HTTPException(_LEFT, "left")))
        try:
            async for progress in self._progress():
                self._answer.choices[progress.row].push(progress)
        finally:
            watch.cancel()
        return JSONResponse(self._answer.whole())

    def _tell(self, event: Progress | Exception) -> None:
        """Called in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def _progress(self) -> AsyncIterator[Progress]:
        """Progress of the rows until all have ended."""
        deadline = self._began + self._timeout_s
        missing = self.job.size
        try:
            while missing:
                async with asyncio.timeout_at(deadline):
                    event = await self._events.get()
                if isinstance(event, Exception):
                    raise _as_refusal(event)
                missing -= event.end is not None
                yield event
            self._leave(is_whole=True)
        except TimeoutError as error:
            cause = f"the answer was not complete within {self._timeout_s:g} s"
            raise HTTPException(503, cause) from error
        except asyncio.CancelledError as error:
            raise HTTPException(503, ENDING) from error
        finally:
            self._leave()

    def _leave(self, *, is_whole: bool = False) -> None:
        """Wait no more."""
        if not self.job.is_left:
            self.job.is_left = True
            self._ended(is_whole)

    async def _pieces(self) -> AsyncIterator[str]:
        """Server-sent events; an error is the last of them."""
        try:
            for piece in self._answer.first():
                yield _event(piece)
            async for progress in self._progress():
                for piece in self._answer.piece(progress):
                    yield _event(piece)
            for piece in self._answer.last():
                yield _event(piece)
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            yield _event(refusal(error.status_code, error.detail))
        finally:
            self._leave()


class _Events(StreamingResponse):
    """A stream whose reader must keep reading."""

    async def stream_response(self, send: Send) -> None:
        """Send the pieces; one that is not taken in `ARRIVAL_S` ends the answer."""

        async def bounded(message: AsgiMessage) -> None:
            async with asyncio.timeout(ARRIVAL_S):
                await send(message)

        await super().stream_response(bounded)


def _event(piece: dict[str, Any]) -> str:
    return f"data: {json.dumps(piece)}\n\n"


def _as_refusal(error: Exception) -> HTTPException:
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, ConnectionAbortedError):
        return HTTPException(503, str(error))
    return HTTPException(500, f"the model failed: {type(error).__name__}: {error}")
