"""The HTTP side of a reward server: FastAPI on uvicorn, samples of many requests in one batch.

event loop (a thread): token, bytes ─► threads: JSON, tokens ─► Waiting ─► the model (main thread)
                  ▲                                                           │
                  └─────────────────── rewards or failure ◄───────────────────┘

What a sender can take of the server is bounded: connections, the time until its request is there,
bytes of requests that are worked on, sequences that wait, and the turn of a large request, which is
scored in slices between the others'.
"""

import asyncio
import contextlib
import hmac
import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from aligner.errors import AlignerError
from aligner.rewards.server.wire import (
    HEALTH,
    JSON_TYPE,
    MAX_BYTES,
    SCORE,
    HealthAnswer,
    ScoreRequest,
    WireSample,
    parse,
)

Ids = list[int]
Rewards = list[list[float]]
GATHER_S = 0.005  # a batch waits so long for more requests
MOST_CONNECTIONS = 512
ARRIVAL_S = 60.0  # of a whole request, headers and body, from the moment it is connected
MOST_BYTES_IN_FLIGHT = 4 * MAX_BYTES  # of the bodies of all requests that are worked on
_PIECE = 2**12  # of what came, for h11


@dataclass
class Job:
    """The sequences of one request, and where their rewards go."""

    sequences: list[Ids]
    rewards: "Future[Rewards]" = field(default_factory=Future)  # cancelled: nobody waits any more
    taken: int = 0  # number of sequences, from the first, that the model was given
    found: Rewards = field(default_factory=list)  # of those that it has scored

    def take(self, at_most: int) -> "Slice":
        """The next sequences."""
        start, self.taken = self.taken, min(self.taken + at_most, len(self.sequences))
        return Slice(self, self.sequences[start : self.taken])

    def add(self, rewards: Rewards) -> None:
        """Rewards of the next sequences; the last complete it."""
        self.found.extend(rewards)
        if len(self.found) == len(self.sequences):
            with contextlib.suppress(InvalidStateError):  # its sender left meanwhile
                self.rewards.set_result(self.found)

    def fail(self, error: Exception) -> None:
        """Report an error to the sender."""
        with contextlib.suppress(InvalidStateError):
            self.rewards.set_exception(error)


class Slice(NamedTuple):
    """Some sequences of a job, which are scored together."""

    job: Job
    sequences: list[Ids]


class Waiting:
    """Requests that wait for the model; they take turns. Threads share it."""

    def __init__(self, max_sequences: int) -> None:
        """``max_sequences``: as many may wait; more are turned away."""
        self.max_sequences = max_sequences
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()

    def add(self, job: Job) -> bool:
        """Queue ``job``; False where there is no room."""
        with self._changed:
            waiting = sum(len(other.sequences) - other.taken for other in self._jobs)
            if waiting + len(job.sequences) > self.max_sequences:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def take(self, at_most: int, timeout_s: float) -> list[Slice]:
        """``at_most`` sequences of one job or several; none came: an empty list.

        A job that is not taken whole queues again behind the others. One that nobody waits for any
        more is left out.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._jobs, timeout_s):
                return []
        time.sleep(GATHER_S)
        with self._changed:
            taken: list[Slice] = []
            room = at_most
            while self._jobs and room:
                job = self._jobs.popleft()
                if job.rewards.done():
                    continue
                taken.append(job.take(room))
                room -= len(taken[-1].sequences)
                if job.taken < len(job.sequences):
                    self._jobs.append(job)
            return taken


@dataclass
class RewardService:
    """Answers to requests; an `HTTPException` is the refusal of one.

    ``encode``: a sample's tokens, or an `AlignerError` for its sender. ``timeout_s``: a
    request waits so long for the model. ``token``: None lets everybody ask.
    """

    attributes: Sequence[str]
    encode: Callable[[WireSample], Ids]
    waiting: Waiting
    timeout_s: float
    token: str | None = None
    _bytes: int = 0  # of bodies that are worked on
    # JSON takes many times its bytes: one request at a time.
    _parsing: threading.Lock = field(default_factory=threading.Lock)

    async def health(self) -> HealthAnswer:
        """Names of what the model rates; open to all, for they give nothing away."""
        return HealthAnswer(status="ok", attributes=list(self.attributes))

    async def score(self, request: Request) -> Response:
        """Rewards of the samples."""
        if self.token is not None:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise HTTPException(401, "the bearer token is missing or wrong")
        body = bytearray()
        try:
            await self._read(request, body)
            sequences = await run_in_threadpool(self._sequences, body)
            rewards = await self._rewards(request, sequences) if sequences else []
        finally:
            self._bytes -= len(body)
        plain = [row[0] if len(row) == 1 else row for row in rewards]
        # Not JSONResponse, which takes no NaN: the client tells its user of one.
        return Response(json.dumps({"rewards": plain}), media_type=JSON_TYPE)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Append what comes to ``body``, as far as there is room for it."""
        length = request.headers.get("Content-Length")
        if length is None or "Transfer-Encoding" in request.headers:
            raise HTTPException(411, "Content-Length is missing")
        if int(length) > MAX_BYTES:
            raise HTTPException(413, f"the body has {length} bytes, at most {MAX_BYTES} are taken")
        async for piece in request.stream():
            if self._bytes + len(piece) > MOST_BYTES_IN_FLIGHT:
                raise HTTPException(503, "too many bytes are being worked on; try again later")
            self._bytes += len(piece)
            body += piece

    def _sequences(self, body: bytearray) -> list[Ids]:
        """The tokens of all samples."""
        most = self.waiting.max_sequences
        try:
            with self._parsing:
                samples = parse(ScoreRequest, body).samples
            if len(samples) <= most:
                return [self.encode(sample) for sample in samples]
        except AlignerError as error:
            raise HTTPException(400, str(error)) from error
        except Exception as error:  # a tokenizer that cannot take the text
            cause = f"{type(error).__name__}: {error}"
            raise HTTPException(400, f"the samples cannot be encoded: {cause}") from error
        raise HTTPException(413, f"{len(samples)} samples, at most {most} are taken in a request")

    async def _rewards(self, request: Request, sequences: list[Ids]) -> Rewards:
        """Rewards of the model; where the sender leaves, nobody waits for them any more."""
        job = Job(sequences)
        if not self.waiting.add(job):
            raise HTTPException(503, "too many samples are waiting; try again later")
        watch = asyncio.create_task(_cancel_when_left(request, job))
        seconds = self.timeout_s
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job.rewards), seconds)
        except asyncio.CancelledError as error:
            raise HTTPException(503, "the server is ending; try again later") from error
        except TimeoutError as error:
            raise HTTPException(503, f"the model did not get to it within {seconds:g} s") from error
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise HTTPException(500, f"the model failed: {cause}") from error
        finally:
            watch.cancel()
            job.rewards.cancel()


async def _cancel_when_left(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.rewards.cancel()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    cause = error.detail
    if error.status_code in (404, 405):
        cause += f": {request.method} {request.url.path[:80]!r}; GET {HEALTH} or POST {SCORE}"
    return JSONResponse({"error": cause}, error.status_code)


class _Connection(H11Protocol):
    """One request and its answer in bounded time; uvicorn by itself waits for a request forever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, unless there are as many connections as may be."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(ARRIVAL_S, self._expire)
        if len(self.connections) > MOST_CONNECTIONS:
            self._refuse(503, "too many connections; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait until the answer is taken."""
        self._deadline.cancel()
        self._deadline = self.loop.call_later(ARRIVAL_S, self.transport.abort)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parse in pieces: headers of any size would pass h11's limit if they came at once."""
        for start in range(0, len(data), _PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _PIECE])

    def eof_received(self) -> None:
        """Refuse a body that ends early; asyncio closes the connection."""
        if self.cycle is not None and self.cycle.more_body:
            self.conn.receive_data(b"")
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 has raised an error for."""
        error = sys.exception()
        self._refuse(getattr(error, "error_status_hint", 400), f"{msg} {error}")

    def _expire(self) -> None:
        if self.cycle is None or self.cycle.more_body:
            self._refuse(408, f"the request did not arrive within {ARRIVAL_S:g} s")

    def _refuse(self, status: int, cause: str) -> None:
        """Answer in place of the application."""
        body = json.dumps({"error": cause}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
            f"Content-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


@contextlib.contextmanager
def http_server(address: tuple[str, int], service: RewardService) -> Iterator[tuple[str, int]]:
    """Answer requests in a thread until the block ends; the host and port that it listens on.

    Raises:
        OSError: it cannot listen at ``address``.
    """
    app = FastAPI(
        openapi_url=None, redirect_slashes=False, exception_handlers={HTTPException: _refused}
    )
    app.add_api_route(HEALTH, service.health)
    app.add_api_route(SCORE, service.score, methods=["POST"])
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        # Requests are not logged: headers hold the token, bodies are people's texts.
        log_config=None,
        log_level="critical",
        access_log=False,
        headers=[("Connection", "close")],
        timeout_graceful_shutdown=1,
    )
    with socket.create_server(address) as listener:
        server = uvicorn.Server(config)
        # A daemon, and so are the threads that it starts: none of them outlives the process.
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            server.should_exit = True
            thread.join(10)
