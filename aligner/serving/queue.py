"""Requests that wait for the engine, and the progress of their answers. Threads share both.

A request becomes rows, one for each answer. Rows that are sampled alike are generated together,
whatever requests they are of.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from aligner.config import LengthParams, SamplingOptions
from aligner.environments.pool import Failure

GATHER_S = 0.005
EndKind = Literal["stop", "length"]


class Progress(NamedTuple):
    """Next tokens of a row, with one log-prob each. ``end``: None: more will come."""

    row: int
    ids: list[int]
    logprobs: list[float]
    end: EndKind | None = None


Tell = Callable[[Progress | Exception], None]


@dataclass
class Row:
    """One answer that is asked for, by a session as its number ``request``.

    ``sample_id``: of which the engine makes random numbers.
    """

    prompt: list[int]
    sample_id: int
    options: SamplingOptions
    request: int | None = None

    @property
    def longest(self) -> int:
        """Most new tokens."""
        return self.options.length.max_length


@dataclass
class Job:
    """The rows of one request. ``tell`` is called in the engine's thread.

    ``failure``: of the engine, in place of an answer.
    """

    rows: Sequence[Row]
    tell: Tell
    taken: int = 0  # rows, from the first, that the engine was given
    ended: int = 0  # rows that have their whole answer
    is_left: bool = False  # nobody waits any more
    failure: Failure | None = None

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def is_open(self) -> bool:
        """True as long as somebody waits for the engine."""
        return not self.is_left and self.failure is None and self.ended < self.size

    def take(self) -> "Slot":
        """The next row."""
        self.taken += 1
        return Slot(self, self.taken - 1)


@dataclass
class Slot:
    """A row of a job, while it is generated."""

    job: Job
    index: int
    made: int = 0  # tokens that its job knows of
    is_ended: bool = False

    @property
    def row(self) -> Row:
        """The row itself."""
        return self.job.rows[self.index]

    @property
    def is_wanted(self) -> bool:
        """False once it has ended, or nobody waits for it."""
        return not (self.is_ended or self.job.is_left)

    def tell(self, ids: list[int], logprobs: list[float], end: EndKind | None) -> None:
        """Tell the job of further tokens; of what comes after the end nobody hears."""
        if self.is_ended or not (ids or end):
            return
        self.made += len(ids)
        self.is_ended = end is not None
        self.job.ended += self.is_ended
        self.job.tell(Progress(self.index, ids, logprobs, end))


class Waiting:
    """Jobs that wait for the engine; they take turns, row by row."""

    def __init__(self, max_rows: int, gather_s: float = GATHER_S) -> None:
        """``max_rows``: as many may wait; more are turned away.

        ``gather_s``: a batch waits so long for more of them.
        """
        self.max_rows, self._gather_s = max_rows, gather_s
        self._jobs: deque[Job] = deque()
        self._is_woken = False
        self._changed = threading.Condition()

    def add(self, job: Job) -> bool:
        """Queue ``job``; False where there is no room."""
        with self._changed:
            waiting = sum(each.size - each.taken for each in self._jobs if not each.is_left)
            if waiting + job.size > self.max_rows:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def take(self, most_rows: int, positions: int, timeout_s: float) -> list[Slot]:
        """Rows that can be generated together; none came: an empty list.

        They are sampled as the one that waited longest is. ``positions``: of the model; the longest
        prompt and the longest answer of a batch fit into them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_woken, timeout_s)
            self._is_woken = False
            if not self._jobs:
                return []
        time.sleep(self._gather_s)
        with self._changed:
            taken: list[Slot] = []
            others: list[Job] = []
            while self._jobs and len(taken) < most_rows:
                job = self._jobs.popleft()
                if job.is_left:
                    continue
                rows = [*(slot.row for slot in taken), job.rows[job.taken]]
                if not fit_together(rows, positions):
                    others.append(job)
                    continue
                taken.append(job.take())
                if job.taken < job.size:
                    self._jobs.append(job)
            self._jobs.extendleft(reversed(others))
            return taken

    def wake(self) -> None:
        """End a wait of `take`."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def fail_all(self, error: Exception) -> None:
        """Tell everybody who waits that there will be no answer."""
        with self._changed:
            for job in self._jobs:
                job.tell(error)
            self._jobs.clear()


def fit_together(rows: Sequence[Row], positions: int) -> bool:
    """Return whether the rows, of which all but the last do, can be one batch."""
    first, last = rows[0].options, rows[-1].options
    if (last.sampling, last.length.min_length) != (first.sampling, first.length.min_length):
        return False
    longest = max(len(row.prompt) for row in rows)
    return longest + batch_options(rows).length.max_length <= positions


def batch_options(rows: Sequence[Row]) -> SamplingOptions:
    """Sampling of a batch: that of its rows, with the length of the longest."""
    first = rows[0].options
    longest = max(row.longest for row in rows)
    return SamplingOptions(LengthParams(longest, first.length.min_length), first.sampling)


def sample_id(*parts: object) -> int:
    """Sample id, 0 <= id < 2**63, of nothing but ``parts``, which are written as text."""
    text = " ".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
