"""The HTTP side of a reward server: requests in threads, samples of many requests in one batch.

thread per connection: token, JSON, tokens ─► Waiting ─► the model's loop (main thread)
                           ▲                                     │
                           └────────── rewards or failure ◄──────┘

What a sender can take of the server is bounded: connections, the time until its request is there,
bytes of requests that are worked on, sequences that wait, and the turn of a large request, which is
scored in slices between the others'.
"""

import contextlib
import hmac
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from aligner.errors import AlignerError
from aligner.rewards.server.wire import (
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
MOST_CONNECTIONS = 512
ARRIVAL_S = 60.0  # of a whole request, headers and body, from the moment it is connected
MOST_BYTES_IN_FLIGHT = 4 * MAX_BYTES  # of the bodies of all requests that are worked on
_LOOK_S = 0.5  # so often a handler looks whether its sender is still there
_PIECE = 2**16


@dataclass
class Job:
    """The sequences of one request, and where their rewards go."""

    sequences: list[Ids]
    deadline: float  # on the monotonic clock: nobody waits after it
    rewards: "Future[Rewards]" = field(default_factory=Future)  # cancelled: nobody waits any more
    taken: int = 0  # number of sequences, from the first, that the model was given
    found: Rewards = field(default_factory=list)  # of those that it has scored

    @property
    def is_wanted(self) -> bool:
        """True if somebody still waits for it."""
        return not self.rewards.done() and time.monotonic() < self.deadline

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
                if not job.is_wanted:
                    continue
                taken.append(job.take(room))
                room -= len(taken[-1].sequences)
                if job.taken < len(job.sequences):
                    self._jobs.append(job)
            return taken


@dataclass(frozen=True)
class RewardService:
    """Objects that the handlers of requests share.

    ``encode``: a sample's tokens, or an `AlignerError` for its sender. ``timeout_s``: a
    request waits so long for the model. ``token``: None lets everybody ask.
    """

    attributes: Sequence[str]
    encode: Callable[[WireSample], Ids]
    waiting: Waiting
    timeout_s: float
    token: str | None = None


class RewardHTTPServer(ThreadingHTTPServer):
    """One thread per connection; a client's mistakes are reported only to that client."""

    daemon_threads = True
    request_queue_size = 512  # connections that wait to be accepted

    def __init__(self, address: tuple[str, int], service: RewardService) -> None:
        super().__init__(address, _Handler)
        self.service = service
        self.parsing = threading.Lock()  # JSON takes many times its bytes: one request at a time
        self._connections: dict[Any, float | None] = {}  # when its request must be there; None: is
        self._bytes = 0  # of bodies that are worked on
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, unless there are as many as may be."""
        with self._lock:
            welcome = len(self._connections) < MOST_CONNECTIONS
            if welcome:
                self._connections[request] = time.monotonic() + ARRIVAL_S
        if welcome:
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Between two connections, and twice a second: end those whose request does not arrive."""
        now = time.monotonic()
        with self._lock:
            late = [item for item, until in self._connections.items() if until and until < now]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def arrived(self, request: Any) -> None:
        """The whole request is there."""
        with self._lock:
            self._connections[request] = None

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], bool]]:
        """A function that takes room for more bytes until the block ends; False: none is left."""
        held = 0

        def take(size: int) -> bool:
            nonlocal held
            with self._lock:
                if self._bytes + size > MOST_BYTES_IN_FLIGHT:
                    return False
                self._bytes += size
            held += size
            return True

        try:
            yield take
        finally:
            with self._lock:
                self._bytes -= held

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a connection: the client closed it."""


class _Handler(BaseHTTPRequestHandler):
    server: RewardHTTPServer
    protocol_version = "HTTP/1.1"
    timeout = ARRIVAL_S  # without a byte ends a connection

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
        with self.server.room() as take:
            body = self._body(take)
            if body is None:
                return
            self.server.arrived(self.request)
            sequences = self._sequences(service, body)
            if sequences is not None:
                self._score(service, sequences)

    def _sequences(self, service: RewardService, body: bytes) -> list[Ids] | None:
        """The tokens of all samples; None where the request was refused."""
        try:
            with self.server.parsing:
                samples = parse_request(body)
            most = service.waiting.max_sequences
            if len(samples) > most:
                self._refuse(413, f"{len(samples)} samples, at most {most} are taken in a request")
                return None
            return [service.encode(sample) for sample in samples]
        except AlignerError as error:
            self._refuse(400, str(error))
        except Exception as error:  # a tokenizer that cannot take the text
            self._refuse(400, f"the samples cannot be encoded: {type(error).__name__}: {error}")
        return None

    def _score(self, service: RewardService, sequences: list[Ids]) -> None:
        if not sequences:
            self._answer(200, rewards_body([]))
            return
        job = Job(sequences, time.monotonic() + service.timeout_s)
        if not service.waiting.add(job):
            self._refuse(503, "too many samples are waiting; try again later")
            return
        while not job.rewards.done() and time.monotonic() < job.deadline:
            with contextlib.suppress(Exception):
                job.rewards.result(min(_LOOK_S, max(0.0, job.deadline - time.monotonic())))
            if not job.rewards.done() and self._sender_left():
                job.rewards.cancel()
                return
        if job.rewards.cancel():
            self._refuse(503, f"the model did not get to it within {service.timeout_s:g} s")
            return
        try:
            rewards = job.rewards.result()
        except Exception as error:
            self._refuse(500, f"the model failed: {type(error).__name__}: {error}")
        else:
            self._answer(200, rewards_body(rewards))

    def _is_welcome(self, token: str | None) -> bool:
        if token is None:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def _sender_left(self) -> bool:
        try:
            if not select.select([self.connection], [], [], 0)[0]:
                return False
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _body(self, take: Callable[[int], bool]) -> bytes | None:
        """The request's body; None where it was refused. ``take``: room for bytes that came."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._refuse(411, "Content-Length is missing")
            return None
        if len(length) > 20:
            self._refuse(400, f"Content-Length has {len(length)} digits")
            return None
        left = int(length)
        if left > MAX_BYTES:
            self._refuse(413, f"the body has {length} bytes, at most {MAX_BYTES} are taken")
            return None
        body = bytearray()
        while left:
            piece = self.rfile.read(min(left, _PIECE))
            if not piece:
                self._refuse(400, f"the body ended {left} bytes early")
                return None
            if not take(len(piece)):
                self._refuse(503, "too many bytes are being worked on; try again later")
                return None
            body += piece
            left -= len(piece)
        return bytes(body)

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
