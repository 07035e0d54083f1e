"""Heartbeats of the ranks of a run: if a rank dies, the others stop with an error that names it.

    thread of rank r ── beat/r ──► store ── beat of the neighbour ──► thread of rank r
    neighbour silent or gone, or error of this rank ── failure ──► store
    store ── failure ──► thread of every rank ── message ──► stderr, then the end of the process

The neighbour of a rank is the next rank that has not left. A rank that reads a failure first lets
its main thread raise an error. Then it ends the process, because a collective that waits for a dead
rank may never return.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist

from aligner.errors import WorkerError
from aligner.parallel.collectives import from_rank_zero, gather_objects
from aligner.parallel.groups import ParallelState

_INTERVAL_S = 0.5  # time between heartbeats
_UNWIND_S = 5.0  # time in which the main thread can end by itself after another rank has died
_LINGER_S = 3.0  # maximum wait until other ranks have read the error that this rank raised
_LEAST_SILENCE_S = 10.0
# Words in errors of gloo and NCCL when the other side of a connection is gone.
_BROKEN_LINK = ("gloo", "nccl", "connection", "socket", "timed out")


def silence_limit(timeout_s: float) -> float:
    """Return after how many seconds without heartbeat a rank counts as dead (at least 10)."""
    return max(_LEAST_SILENCE_S, timeout_s / 30)


@dataclass(frozen=True)
class _Process:
    """Process of a rank. Process ids are unique only within a host and a pid ``namespace``."""

    rank: int
    role: str
    host: str
    namespace: str
    pid: int
    started: float

    @classmethod
    def current(cls, parallel: ParallelState) -> "_Process":
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
        return f"rank {self.rank} ({self.role}, host {self.host}, pid {self.pid})"

    def is_gone(self, observer: "_Process") -> bool:
        """Return whether the process has ended. False if ``observer`` is on another host."""
        if (self.host, self.namespace) != (observer.host, observer.namespace):
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != self.started
        except psutil.NoSuchProcess:
            return True


class RankWatch:
    """Sends heartbeats of this rank to a key-value store, and checks those of the next rank.

    Keys of the store: ``beat/R`` (number of heartbeats of rank R), ``left/R`` (1 after rank R has
    finished), ``left`` (number of finished ranks), ``failure`` (text of the first failure),
    ``received`` (number of ranks that have read the failure).
    """

    def __init__(self, parallel: ParallelState, timeout_s: float) -> None:
        """Start a thread that sends heartbeats and checks. All ranks must call this together."""
        self._silence_s = silence_limit(timeout_s)
        self._world_size = parallel.world_size
        self._process = _Process.current(parallel)
        self._store = _new_connection(self._silence_s)
        self._processes = gather_objects(self._process)
        self._failure: str | None = None  # of another rank
        self._has_failed = threading.Event()
        self._over = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}  # rank → last heartbeat, time of its change
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def failure(self, wait_s: float = 0.0) -> str | None:
        """Return another rank's failure, or None if there is none within ``wait_s`` seconds."""
        self._has_failed.wait(wait_s)
        return self._failure

    def look(self) -> None:
        """Check all processes on this host now, and report the first one that has ended."""
        with contextlib.suppress(RuntimeError):
            for process in self._processes:
                if process.is_gone(self._process) and not self._has_left(process):
                    self._report(self._record(f"{process} died: its process is gone"))
                    return

    def leave(self) -> None:
        """Record that this rank has finished, so that others expect no heartbeats from it."""
        with contextlib.suppress(RuntimeError):
            self._store.add(f"left/{self._process.rank}", 1)
            self._store.add("left", 1)
            # Without a launcher the store lives in rank 0, and the others still need it.
            is_host = self._process.rank == 0 and not _launcher_keeps_store()
            while is_host and self._store.add("left", 0) < self._world_size:
                if self._has_failed.wait(0.1):
                    break
        self._end()

    def leave_failing(self, error: BaseException) -> None:
        """Report this rank's ``error``. Raise `WorkerError` instead if a dead rank caused it."""
        is_broken_link = _is_broken_link(error)
        # A broken link is usually the effect of another rank's death: wait for its report.
        cause = self.failure(self._silence_s + 2 * _INTERVAL_S if is_broken_link else 0.0)
        if cause is None:
            self._record(f"{self._process} raised {type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):
                deadline = time.monotonic() + _LINGER_S
                while self._store.add("received", 0) < self._world_size - 1:
                    if self._has_failed.wait(0.1) or time.monotonic() > deadline:
                        break
        self._end()
        if cause is not None and is_broken_link:
            raise WorkerError(f"{cause} (seen by rank {self._process.rank})") from error

    def _end(self) -> None:
        # An interpreter that ends while a thread uses the store is aborted.
        self._over.set()
        self._thread.join(self._silence_s)

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            try:
                self._store.add(f"beat/{self._process.rank}", 1)
                is_recorded = self._store.check(["failure"])
                failure = self._store.get("failure").decode() if is_recorded else None
                failure = failure or self._neighbour_failure()
            except RuntimeError as error:  # the connection to the store
                if self._over.is_set():
                    return
                host, reason = str(self._processes[0]), str(error).partition("\n")[0]
                if _launcher_keeps_store():
                    host = "the launcher at {MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
                failure = f"{host} died: its store is gone ({reason})"
            if failure is not None and not failure.startswith(str(self._process)):
                self._stop(failure)
                return

    def _stop(self, failure: str) -> None:
        """Print the failure. If the main thread does not raise it in time, end the process."""
        self._report(failure)
        with contextlib.suppress(RuntimeError):
            self._store.add("received", 1)
        if not self._over.wait(_UNWIND_S):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no exception can reach a main thread that waits in a collective

    def _report(self, failure: str) -> None:
        if self._failure is None:
            self._failure = failure
            print(f"rank {self._process.rank} stops: {failure}", file=sys.stderr, flush=True)
        self._has_failed.set()

    def _record(self, failure: str) -> str:
        """Record a failure in the store. Return the first failure, which may be another rank's."""
        try:
            return self._store.compare_set("failure", "", failure).decode()
        except RuntimeError:  # the store ended with its host
            return failure

    def _neighbour_failure(self) -> str | None:
        """Check the next unfinished rank. If it has failed, record and return the failure."""
        rank = self._process.rank
        following = self._processes[rank + 1 :] + self._processes[:rank]
        neighbour = next((process for process in following if not self._has_left(process)), None)
        if neighbour is None:
            return None
        # How long ago did its heartbeat change?
        beat, now = self._store.add(f"beat/{neighbour.rank}", 0), time.monotonic()
        last_beat, changed = self._beats.get(neighbour.rank, (-1, now))
        if beat != last_beat:
            self._beats[neighbour.rank] = (beat, now)
        silent_s = now - changed if beat == last_beat else 0.0
        if neighbour.is_gone(self._process):
            reason = "its process is gone"
        elif silent_s > self._silence_s:
            reason = f"no heartbeat for {silent_s:.0f} s"
        else:
            return None
        # The neighbour may have left, or recorded its error, since the store was read above.
        if self._has_left(neighbour):
            return None
        return self._record(f"{neighbour} died: {reason}")

    def _has_left(self, process: _Process) -> bool:
        return self._store.add(f"left/{process.rank}", 0) > 0


@contextlib.contextmanager
def watched_ranks(parallel: ParallelState, timeout_s: float) -> Iterator[None]:
    """Context manager: if a rank dies in the block, end all ranks with a `WorkerError` naming it.

    All ranks must enter the block. ``timeout_s``: time limit of collectives (see `silence_limit`).
    """
    if parallel.world_size == 1:
        yield
        return
    watch = RankWatch(parallel, timeout_s)
    # Also covers leaving: the launcher's SIGTERM may arrive while a broken link raises an error.
    with _delayed_sigterm(watch):
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
def _delayed_sigterm(watch: RankWatch) -> Iterator[None]:
    """Delay SIGTERM, which launchers send to surviving ranks, until the dead rank is reported."""
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


def _new_connection(timeout_s: float) -> dist.Store:
    """Open a separate connection to the store, because a collective can block the default one."""
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


def _is_broken_link(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a lost connection to another rank."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(word in text for word in _BROKEN_LINK):
            return True
        error = error.__cause__ or error.__context__
    return False
