"""The HTTP side of a reward server: requests in threads, samples of many requests in one batch.

thread per connection: token, JSON, tokens ─► Waiting ─► the model's loop (main thread)
                           ▲                                     │
                           └────────── rewards or failure ◄──────┘
"""

import hmac
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aligner.errors import AlignerError
from aligner.models.reward.wire import (
    HEALTH,
    JSON_TYPE,
    MAX_BYTES,
    SCORE,
    WireSample,
    error_body,
    health_body,
    parse_request,
    rewards_body,
)

Ids = list[int]
Rewards = list[list[float]]
GATHER_S = 0.005  # a batch waits so long for more requests


@dataclass
class Job:
    """The sequences of one request, and where their rewards go."""

    sequences: list[Ids]
    deadline: float  # on the monotonic clock: nobody waits after it
    rewards: "Future[Rewards]" = field(default_factory=Future)


class Waiting:
    """Requests that wait for the model, first come, first served. Threads share it."""

    def __init__(self, max_sequences: int) -> None:
        """``max_sequences``: as many may wait; more are turned away."""
        self._jobs: list[Job] = []
        self._max_sequences = max_sequences
        self._changed = threading.Condition()

    def add(self, job: Job) -> bool:
        """Queue ``job``; False where there is no room."""
        with self._changed:
            waiting = sum(len(other.sequences) for other in self._jobs)
            if self._jobs and waiting + len(job.sequences) > self._max_sequences:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def take(self, at_most: int, timeout_s: float) -> list[Job]:
        """Jobs of about ``at_most`` sequences together, at least one; none came: an empty list."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._jobs, timeout_s):
                return []
        time.sleep(GATHER_S)
        with self._changed:
            taken: list[Job] = []
            size = 0
            while self._jobs and (not taken or size + len(self._jobs[0].sequences) <= at_most):
                job = self._jobs.pop(0)
                if job.deadline > time.monotonic():
                    taken.append(job)
                    size += len(job.sequences)
            return taken


@dataclass(frozen=True)
class RewardService:
    """What the handlers of requests share.

    ``encode``: a sample's tokens, or an `AlignerError` that its sender is told. ``timeout_s``: a
    request waits so long for the model. ``token``: None lets everybody ask.
    """

    attributes: Sequence[str]
    encode: Callable[[WireSample], Ids]
    waiting: Waiting
    timeout_s: float
    token: str | None = None


class RewardHTTPServer(ThreadingHTTPServer):
    """One thread per connection; what a client does wrong is told to that client alone."""

    daemon_threads = True
    request_queue_size = 512  # connections that wait to be accepted

    def __init__(self, address: tuple[str, int], service: RewardService) -> None:
        super().__init__(address, _Handler)
        self.service = service

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no matter of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: RewardHTTPServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds without a byte end a connection

    def do_GET(self) -> None:
        """Health; open to all, for it gives nothing away."""
        if self.path == HEALTH:
            self._answer(200, health_body(self.server.service.attributes))
        else:
            self._refuse(404, f"there is no {self.path[:80]!r}; GET {HEALTH} or POST {SCORE}")

    def do_POST(self) -> None:
        """Scores."""
        service = self.server.service
        if self.path != SCORE:
            self._refuse(404, f"there is no {self.path[:80]!r}; GET {HEALTH} or POST {SCORE}")
            return
        if not self._is_welcome(service.token):
            self._refuse(401, "the bearer token is missing or wrong")
            return
        body = self._body()
        if body is None:
            return
        try:
            sequences = [service.encode(sample) for sample in parse_request(body)]
        except AlignerError as error:
            self._refuse(400, str(error))
            return
        self._score(service, sequences)

    def _score(self, service: RewardService, sequences: list[Ids]) -> None:
        if not sequences:
            self._answer(200, rewards_body([]))
            return
        job = Job(sequences, time.monotonic() + service.timeout_s)
        if not service.waiting.add(job):
            self._refuse(503, "too many samples are waiting; try again later")
            return
        try:
            rewards = job.rewards.result(service.timeout_s)
        except FutureTimeoutError:
            self._refuse(503, f"the model did not get to it within {service.timeout_s:g} s")
        except Exception as error:
            self._refuse(500, f"the model failed: {type(error).__name__}: {error}")
        else:
            self._answer(200, rewards_body(rewards))

    def _is_welcome(self, token: str | None) -> bool:
        if token is None:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def _body(self) -> bytes | None:
        """The request's body; None where it was refused."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._refuse(411, "Content-Length is missing")
            return None
        if int(length) > MAX_BYTES:
            self._refuse(413, f"the body has {length} bytes, at most {MAX_BYTES} are taken")
            return None
        return self.rfile.read(int(length))

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True  # a body may be left unread
        self._answer(status, error_body(message))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", JSON_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Requests are not logged: headers hold the token, bodies are people's texts."""
