"""A rank that dies makes the others stop with an error that names it.

While a run of several processes is watched, a thread of each beats in a store that all of them
reach and looks at its neighbour, the next rank that has not left. A neighbour whose process is gone
(seen at once on the same machine) or whose beat has stopped (another machine, a lost network) is
recorded in the store, as is an error that a rank raises. A rank that reads such a record prints it
and ends: its main thread is given a moment to unwind, then the process is ended, for a collective
that waits for a dead rank may not return for as long as ``cluster.timeout_s``.

    rank 1: beat, look at rank 2 ──► store: "rank 2 (host b, pid 7) died: …" ──► all others stop

Beats come from a thread, so a long step stops none. A single process starts no thread.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist

from aligner.errors import WorkerError
from aligner.parallel.collectives import from_rank_zero
from aligner.parallel.groups import ParallelState

_INTERVAL_S = 0.5  # between beats
_UNWIND_S = 5.0  # for the main thread to end by itself once a rank is known to have died
_LINGER_S = 3.0  # for the others to read what this rank raised
_LEAST_SILENCE_S = 10.0
# What gloo and NCCL raise when the other side of a connection is gone.
_BROKEN_LINK = ("gloo", "nccl", "connection", "socket", "timed out")


def silence_limit(timeout_s: float) -> float:
    """Seconds without a beat after which a rank on another machine is taken for dead.

    A thirtieth of the longest wait in a collective, and 10 at the least.
    """
    return max(_LEAST_SILENCE_S, timeout_s / 30)


@dataclass(frozen=True)
class _Place:
    """Place of a rank; its ``pid`` is meaningful only within its ``namespace``."""

    rank: int
    role: str
    host: str
    namespace: str
    pid: int
    started: float

    @classmethod
    def here(cls, parallel: ParallelState) -> "_Place":
        namespace = Path("/proc/self/ns/pid")
        return cls(
            rank=parallel.rank,
            role=f"data {parallel.dp_rank}, tensor {parallel.tp_rank}, pipeline {parallel.pp_rank}",
            host=socket.gethostname(),
            namespace=os.readlink(namespace) if namespace.exists() else "",
            pid=os.getpid(),
            started=psutil.Process().create_time(),
        )

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.role}; host {self.host}, pid {self.pid})"

    def is_gone(self, seen_from: "_Place") -> bool:
        """Return whether the process has ended, as far as it is visible to ``seen_from``."""
        if (self.host, self.namespace) != (seen_from.host, seen_from.namespace):
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != self.started
        except psutil.NoSuchProcess:
            return True


class RankWatch:
    """One rank's part in watching: its beats, and the neighbour it looks at."""

    def __init__(self, parallel: ParallelState, timeout_s: float) -> None:
        """Join the others; collective. Beats start with `start`."""
        self._silence_s = silence_limit(timeout_s)
        self._world = parallel.world_size
        self._me = _Place.here(parallel)
        self._store = _own_connection(self._silence_s)
        self._store.set(f"place/{self._me.rank}", json.dumps(asdict(self._me)))
        places = (json.loads(self._store.get(f"place/{rank}")) for rank in range(self._world))
        self._places = [_Place(**place) for place in places]
        self._failure: str | None = None  # of another rank
        self._found = threading.Event()
        self._over = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}  # rank → last beat, when it was new here
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        """Begin to beat and to look."""
        self._thread.start()

    def failure(self, wait_s: float = 0.0) -> str | None:
        """Failure of another rank; waits up to ``wait_s`` for a report."""
        self._found.wait(wait_s)
        return self._failure

    def look(self) -> None:
        """Report at once a rank whose process on this machine is gone, if there is one."""
        with contextlib.suppress(RuntimeError):
            for place in self._places:
                if place.is_gone(self._me) and not self._has_left(place):
                    self._tell(self._publish(f"{place} died: its process is gone"))
                    return

    def leave(self) -> None:
        """Leave: this rank has done its work, and its silence means nothing from now on."""
        with contextlib.suppress(RuntimeError):
            self._store.add(f"left/{self._me.rank}", 1)
            self._store.add("left", 1)
            # The store lives in rank 0 where no launcher keeps it; the others still look there.
            is_host = self._me.rank == 0 and not _launcher_keeps_store()
            while is_host and self._store.add("left", 0) < self._world:
                if self._found.wait(0.1):
                    break
        self._end()

    def leave_failing(self, error: BaseException) -> None:
        """Report this rank's error to the others; raises `WorkerError` when another died first."""
        wait_s = self._silence_s + 2 * _INTERVAL_S if _is_broken_link(error) else 0.0
        elsewhere = self.failure(wait_s)
        if elsewhere is None:
            self._publish(f"{self._me} raised {type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):
                deadline = time.monotonic() + _LINGER_S
                while self._store.add("heard", 0) < self._world - 1:
                    if self._found.wait(0.1) or time.monotonic() > deadline:
                        break
        self._end()
        if elsewhere is not None and _is_broken_link(error):
            raise WorkerError(f"{elsewhere}; this is rank {self._me.rank}") from error

    def _end(self) -> None:
        """Stop the beats. An interpreter that ends while a thread is in the store is aborted."""
        self._over.set()
        self._thread.join(self._silence_s)

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            try:
                self._store.add(f"beat/{self._me.rank}", 1)
                is_recorded = self._store.check(["failure"])
                news = self._store.get("failure").decode() if is_recorded else None
                news = news or self._neighbour_failure()
            except RuntimeError as error:  # the connection to the store
                if self._over.is_set():
                    return
                news = f"{_store_host(self._places[0])} died: its store is gone ({_line(error)})"
            if news is not None and not news.startswith(str(self._me)):
                self._stop(news)
                return

    def _stop(self, news: str) -> None:
        """Print the error, give the main thread a moment, then end the process."""
        self._tell(news)
        with contextlib.suppress(RuntimeError):
            self._store.add("heard", 1)
        if not self._over.wait(_UNWIND_S):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # the main thread waits in a collective that no exception can reach

    def _tell(self, news: str) -> None:
        if self._failure is None:
            self._failure = news
            print(f"rank {self._me.rank} stops: {news}", file=sys.stderr, flush=True)
        self._found.set()

    def _publish(self, text: str) -> str:
        """Record a failure; the first record counts and is returned."""
        try:
            return self._store.compare_set("failure", "", text).decode()
        except RuntimeError:  # the store went with its host
            return text

    def _neighbour_failure(self) -> str | None:
        first = self._me.rank + 1
        others = self._places[first:] + self._places[: self._me.rank]
        neighbour = next((place for place in others if not self._has_left(place)), None)
        if neighbour is None:
            return None
        beat, now = self._store.add(f"beat/{neighbour.rank}", 0), time.monotonic()
        last, since = self._beats.get(neighbour.rank, (-1, now))
        if beat != last:
            self._beats[neighbour.rank] = (beat, now)
        silent_s = now - since if beat == last else 0.0
        if neighbour.is_gone(self._me):
            reason = "its process is gone"
        elif silent_s > self._silence_s:
            reason = f"no heartbeat for {silent_s:.0f} s"
        else:
            return None
        # It may have left, or recorded its error, between the looks at the store.
        if self._has_left(neighbour):
            return None
        return self._publish(f"{neighbour} died: {reason}")

    def _has_left(self, place: _Place) -> bool:
        return self._store.add(f"left/{place.rank}", 0) > 0


@contextlib.contextmanager
def watched_ranks(parallel: ParallelState, timeout_s: float) -> Iterator[None]:
    """The block in which the death of any rank ends all of them; collective.

    Args:
        parallel: the processes of the run.
        timeout_s: longest wait in a collective (``cluster.timeout_s``), see `silence_limit`.

    Raises:
        WorkerError: a collective failed because another rank died; names the rank.
    """
    if parallel.world_size == 1:
        yield
        return
    watch = RankWatch(parallel, timeout_s)
    watch.start()
    # Around the leaving too: a broken link raises here while the launcher's SIGTERM is on its way.
    with _named_before_sigterm(watch):
        try:
            yield
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                watch.leave()
            else:
                watch.leave_failing(error)
            raise
        watch.leave()


@contextlib.contextmanager
def _named_before_sigterm(watch: RankWatch) -> Iterator[None]:
    """Delay SIGTERM, with which launchers end the other ranks, until the dead rank is known."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    previous = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        watch.look()
        watch.failure(wait_s=4 * _INTERVAL_S)
        signal.signal(signal.SIGTERM, previous)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _own_connection(timeout_s: float) -> dist.Store:
    """A connection of our own to the store the processes met at, under a name of this run.

    The default group's own connection is busy while a collective is set up.
    """
    run = from_rank_zero(f"{os.getpid()}-{time.time_ns()}")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.PrefixStore(f"aligner/heartbeat/{run}", store)


def _launcher_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_host(first: _Place) -> str:
    if _launcher_keeps_store():
        return f"the launcher at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return str(first)


def _is_broken_link(error: BaseException | None) -> bool:
    """Return whether the error, or what caused it, may be another rank's death seen from here."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(word in text for word in _BROKEN_LINK):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
