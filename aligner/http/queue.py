"""Jobs that wait for a model, and the slots in which their items are worked on.

A request becomes a job with an item for each result. Threads share all of it: the event loop adds
jobs, the model's thread takes their items and reports results.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
ENDING = "the server is ending; try again later"


@dataclass
class Job(Generic[Item]):
    """The items of one request.

    ``report`` is called in the model's thread, with each result or with the error in place of all
    that are missing.
    """

    items: Sequence[Item]
    report: Callable[[Any], None]
    taken: int = 0  # items, from the first, that the model was given
    ended: int = 0  # items whose result is complete
    is_left: bool = False  # nobody waits any more


@dataclass
class Slot(Generic[Item]):
    """An item of a job while the model works on it."""

    job: Job[Item]
    index: int
    reported: int = 0  # parts of the result that its job was told, such as tokens
    is_ended: bool = False

    @property
    def item(self) -> Item:
        """The item itself."""
        return self.job.items[self.index]

    @property
    def is_wanted(self) -> bool:
        """False once it has ended, or nobody waits for it."""
        return not (self.is_ended or self.job.is_left)

    def report(self, result: Any, *, parts: int = 1, is_last: bool = True) -> None:
        """Report the next ``parts`` of the item's result."""
        self.reported += parts
        self.is_ended = is_last
        self.job.ended += is_last
        self.job.report(result)

    def fail(self, error: Exception) -> None:
        """Report an error, unless the result is complete."""
        if not self.is_ended:
            self.job.report(error)


class JobQueue(Generic[Item]):
    """Jobs that wait for a model; they take turns."""

    def __init__(self, max_items: int, gather_s: float = 0.005, turn: int = 1) -> None:
        """Make an empty queue.

        Args:
            max_items: as many may wait; further jobs are turned away.
            gather_s: a batch waits so long for more of them.
            turn: most items that a job gives to a batch before the next job's turn; a large job
                delays no other.
        """
        self.max_items, self._gather_s, self._turn = max_items, gather_s, turn
        self._jobs: deque[Job[Item]] = deque()
        self._is_woken = False
        self._changed = threading.Condition()

    def add(self, job: Job[Item]) -> bool:
        """Queue ``job``; False if there is no room."""
        with self._changed:
            if self._waiting() + len(job.items) > self.max_items:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def take(
        self,
        most: int,
        timeout_s: float,
        fit_together: Callable[[list[Item]], bool] = lambda items: True,
        is_complete: Callable[[int], bool] = lambda waiting: False,
    ) -> list[Slot[Item]]:
        """At most ``most`` items that can be one batch; an empty list if none came in time.

        A job that is not taken whole queues again after the others, and one that nobody waits for
        any more is dropped. ``fit_together``: whether items can be one batch, of which all but the
        last can; a job whose next item does not fit keeps its place. ``is_complete``: whether no
        more items are to be gathered than so many.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_woken, timeout_s)
            self._is_woken = False
            if not self._jobs:
                return []
            self._changed.wait_for(lambda: is_complete(self._waiting()), self._gather_s)
            taken: list[Slot[Item]] = []
            passed_over: list[Job[Item]] = []
            while self._jobs and len(taken) < most:
                job = self._jobs.popleft()
                if job.is_left:
                    continue
                if not fit_together([*(slot.item for slot in taken), job.items[job.taken]]):
                    passed_over.append(job)
                    continue
                start = job.taken
                job.taken = min(start + self._turn, start + most - len(taken), len(job.items))
                taken += [Slot(job, index) for index in range(start, job.taken)]
                if job.taken < len(job.items):
                    self._jobs.append(job)
            self._jobs.extendleft(reversed(passed_over))
            return taken

    def _waiting(self) -> int:
        return sum(len(job.items) - job.taken for job in self._jobs if not job.is_left)

    def wake(self) -> None:
        """End a wait of `take` for jobs; have it ask again whether the batch is complete."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def fail_all(self, error: Exception) -> None:
        """Report ``error`` to all jobs that wait."""
        with self._changed:
            for job in self._jobs:
                job.report(error)
            self._jobs.clear()
