"""One request and its answer: from the event loop to the engine's thread and back.

request ─► Exchange ── job ──► JobQueue ──► engine's thread
              │ ▲                               │
   answer ◄───┘ └────────── Results ◄───────────┘
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import Message as AsgiMessage
from starlette.types import Send

from aligner.generation.rows import Progress, Row, RowJob
from aligner.http import JSON_TYPE
from aligner.http.listening import ARRIVAL_S
from aligner.http.queue import JobQueue
from aligner.http.results import Results
from aligner.serving.answers import Answer

_json = partial(to_json, inf_nan_mode="null")
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


def refusal(status: int, cause: str) -> dict[str, Any]:
    """Return the body of an error response in OpenAI's format. Its ``param`` is the invalid key."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    key, colon, _ = cause.partition(":")
    names_key = bool(colon) and status == 400 and key.replace(".", "").replace("_", "").isalnum()
    param = key if names_key else None
    return {"error": {"message": cause, "type": kind, "param": param, "code": _CODES.get(status)}}


@dataclass
class Exchange:
    """Sends one request to the engine and returns its answer. Created in the event loop.

    The answer must be complete ``timeout_s`` seconds after ``began``, a time of the event loop's
    clock. ``end`` is called once, with True after a complete answer and False after a failure.
    """

    job: RowJob
    results: Results[Progress]
    answer: Answer
    timeout_s: float
    began: float
    end: Callable[[bool], None]
    _is_over: bool = False

    async def response(self, queue: JobQueue[Row], request: Request, *, stream: bool) -> Response:
        """Return the HTTP response: the complete answer, or with ``stream`` server-sent events.

        Raises `HTTPException`: 429 if ``queue`` is full, 500 or 503 if the request failed.
        """
        if not queue.add(self.job):
            self._leave()
            raise HTTPException(429, "too many requests are waiting, try again later")
        if stream:
            return _Events(self._pieces(), media_type="text/event-stream")
        with self.results.while_connected(request):
            async for progress in self._progress():
                self.answer.choices[progress.row].push(progress)
        return Response(_json(self.answer.complete()), media_type=JSON_TYPE)

    async def _progress(self) -> AsyncIterator[Progress]:
        deadline = self.began + self.timeout_s
        timeout_message = f"the answer was not complete within {self.timeout_s:g} s"
        results = self.results.of(self.job, deadline, timeout_message, lambda p: p.end is not None)
        try:
            async for progress in results:
                yield progress
            self._leave(is_complete=True)
        finally:
            self._leave()

    def _leave(self, *, is_complete: bool = False) -> None:
        self.job.is_abandoned = True
        if not self._is_over:
            self._is_over = True
            self.end(is_complete)

    async def _pieces(self) -> AsyncIterator[str]:
        """Yield the server-sent events of the answer. An error becomes the last event."""
        try:
            for piece in self.answer.first():
                yield _event(piece)
            async for progress in self._progress():
                for piece in self.answer.pieces(progress):
                    yield _event(piece)
            for piece in self.answer.last():
                yield _event(piece)
            yield "data: [DONE]\n\n"
        # The status was already sent, so an error is an event, too.
        except HTTPException as error:
            yield _event(refusal(error.status_code, error.detail))
        finally:
            self._leave()


class _Events(StreamingResponse):
    """A streamed response that ends if the client does not accept an event within `ARRIVAL_S`."""

    async def stream_response(self, send: Send) -> None:
        async def bounded(message: AsgiMessage) -> None:
            async with asyncio.timeout(ARRIVAL_S):
                await send(message)

        await super().stream_response(bounded)


def _event(data: Any) -> str:
    return f"data: {_json(data).decode()}\n\n"
