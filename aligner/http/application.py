"""HTTP applications: routes, bearer tokens, size limits of request bodies, error responses."""

import contextlib
import hmac
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from aligner.errors import AlignerError
from aligner.http import MAX_BYTES
from aligner.http.listening import Refusal, listening
from aligner.http.queue import JobQueue
from aligner.http.results import ENDING

Parsed = TypeVar("Parsed")
Routes = Mapping[str, Callable[..., Any]]  # from, for instance, ``GET /health`` to the endpoint
MAX_BYTES_IN_FLIGHT = 4 * MAX_BYTES  # total size of the bodies of all current requests


def check_bearer(request: Request, token: str | None) -> None:
    """Raise `HTTPException` 401 if a request's bearer token is not ``token`` (None: any)."""
    if token is None:
        return
    header = request.headers.get("Authorization", "").encode()
    if not hmac.compare_digest(header, f"Bearer {token}".encode()):
        raise HTTPException(401, "the bearer token is missing or wrong")


class Bodies:
    """Reads request bodies, and limits the bytes of all bodies in memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self._parsing = threading.Lock()  # parsed JSON is many times larger, so one at a time

    @contextlib.asynccontextmanager
    async def read(
        self, request: Request, parse: Callable[[bytearray], Parsed]
    ) -> AsyncIterator[Parsed]:
        """Async context manager: read a request's body, and yield the result of ``parse``.

        In the block the body counts towards `MAX_BYTES_IN_FLIGHT`. Raises `HTTPException`: 411, 413
        or 503 for the size, and 400 if ``parse`` fails.
        """

        def parsed() -> Parsed:
            with self._parsing:
                return blame_sender(parse, body)

        length, body = request.headers.get("Content-Length"), bytearray()
        if length is None or "Transfer-Encoding" in request.headers:
            raise HTTPException(411, "Content-Length is missing. Send the length of the body")
        if int(length) > MAX_BYTES:
            raise HTTPException(413, f"the body has {length} bytes, but the limit is {MAX_BYTES}")
        # Count bytes as they arrive, for the limit of all requests together.
        try:
            async for piece in request.stream():
                if self._bytes + len(piece) > MAX_BYTES_IN_FLIGHT:
                    raise HTTPException(503, "too many bytes are being processed, try again later")
                self._bytes += len(piece)
                body += piece
            yield await run_in_threadpool(parsed)
        finally:
            self._bytes -= len(body)


def blame_sender(function: Callable[..., Parsed], *arguments: Any) -> Parsed:
    """Call ``function`` on a request's contents. Convert its errors to `HTTPException` 400."""
    try:
        return function(*arguments)
    except HTTPException:
        raise
    except AlignerError as error:
        raise HTTPException(400, str(error)) from error
    except Exception as error:  # of a tokenizer or a template that cannot take the text
        cause = f"{type(error).__name__}: {error}"
        raise HTTPException(400, f"the request cannot be encoded: {cause}") from error


@contextlib.contextmanager
def http_server(
    address: tuple[str, int],
    routes: Routes,
    queue: JobQueue[Any],
    *,
    setting: str,
    refusal: Refusal = lambda status, cause: {"error": cause},
    connections: int | None = None,
) -> Iterator[tuple[str, int]]:
    """Context manager: serve HTTP in a thread during the block, and yield (host, port).

    ``address``: (host, port). Port 0 selects a free port. ``queue``: queue of the endpoints, whose
    jobs fail when the block ends. ``setting``: configuration key and value of the address, for the
    error message. ``refusal``: returns the body of an error response. ``connections``: maximum
    number of connections, lowered to the limit of open files.

    Raises `ConfigError` if the server cannot listen at ``address``.
    """
    endpoints = ", ".join(route for route in routes if "{" not in route)

    async def refuse(request: Request, error: Exception) -> Response:
        status, cause = 500, f"{type(error).__name__}: {error}"
        if isinstance(error, HTTPException):
            status, cause = error.status_code, error.detail
        # For an unknown path or method, list the endpoints.
        if cause in ("Not Found", "Method Not Allowed"):
            cause += f": {request.method} {request.url.path[:80]!r}. There are {endpoints}"
        return JSONResponse(refusal(status, cause), status)

    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: refuse, Exception: refuse},
    )
    for route, endpoint in routes.items():
        method, _, path = route.partition(" ")
        # Without a response model, FastAPI does not validate the answers.
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    with listening(app, address, refusal, setting, connections) as actual_address:
        try:
            yield actual_address
        finally:
            queue.fail_all(ConnectionAbortedError(ENDING))
