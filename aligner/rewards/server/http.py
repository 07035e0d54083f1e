"""The HTTP side of a reward server: FastAPI on uvicorn, samples of many requests in one batch.

event loop (a thread): token, bytes ─► threads: JSON, tokens ─► Waiting ─► the model (main thread)
                  ▲                                                           │
                  └─────────────────── rewards or failure ◄───────────────────┘

What a sender can take of the server is bounded: by `aligner.http.listening`, and by the sequences
that wait and the turn of a large request, which is scored in slices between the others'.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from aligner.errors import AlignerError
from aligner.http import JSON_TYPE
from aligner.http.listening import (
    Bodies,
    check_bearer,
    disconnected,
    listening,
    plain_refusal,
)
from aligner.http.messages import parse
from aligner.rewards.server.wire import (
    HEALTH,
    SCORE,
    HealthAnswer,
    ScoreRequest,
    WireSample,
)

Ids = list[int]
Rewards = list[list[float]]
GATHER_S = 0.005  # a batch waits so long for more requests


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
    _bodies: Bodies = field(default_factory=Bodies)
    # JSON takes many times its bytes: one request at a time.
    _parsing: threading.Lock = field(default_factory=threading.Lock)

    async def health(self) -> HealthAnswer:
        """Names of what the model rates; open to all, for they give nothing away."""
        return HealthAnswer(status="ok", attributes=list(self.attributes))

    async def score(self, request: Request) -> Response:
        """Rewards of the samples."""
        check_bearer(request, self.token)
        async with self._bodies.read(request) as body:
            sequences = await run_in_threadpool(self._sequences, body)
            rewards = await self._rewards(request, sequences) if sequences else []
        plain = [row[0] if len(row) == 1 else row for row in rewards]
        # Not JSONResponse, which takes no NaN: the client tells its user of one.
        return Response(json.dumps({"rewards": plain}), media_type=JSON_TYPE)

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
    await disconnected(request)
    job.rewards.cancel()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    cause = error.detail
    if error.status_code in (404, 405):
        cause += f": {request.method} {request.url.path[:80]!r}; GET {HEALTH} or POST {SCORE}"
    return JSONResponse(plain_refusal(error.status_code, cause), error.status_code)


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
    with listening(app, address) as place:
        yield place
