"""Jobs that wait for a model, and the items that the model processes.

event loop: request ─► Job, an item per result ─► JobQueue ─► Slot per item: the model's thread
                ▲                                                         │
                └───────────────────── Job.report ◄───────────────────────┘
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
ENDING = "the server is ending, try again later"


@dataclass
class Job(Generic[Item]):
    """The items of one request."""

    items: Sequence[Item]
    report: Callable[[Any], None]  # called by the model's thread with each result or an error
    started: int = 0  # number of items that the model has started, in the order of `items`
    ended: int = 0  # number of items whose result is complete
    is_abandoned: bool = False  # no client waits for the results


@dataclass
class Slot(Generic[Item]):
    """An item of a job while the model processes it."""

    job: Job[Item]
    index: int
    reported: int = 0  # number of reported parts of the result, such as tokens
    is_ended: bool = False

    @property
    def item(self) -> Item:
        """The item that the model processes."""
        return self.job.items[self.index]

    @property
    def is_wanted(self) -> bool:
        """False after the item has ended or its job was abandoned."""
        return not (self.is_ended or self.job.is_abandoned)

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
    """Jobs that wait for a model and take turns."""

    def __init__(self, max_items: int, gather_s: float = 0.005, turn: int = 1) -> None:
        """Create an empty queue for ``max_items`` waiting items.

        ``gather_s``: seconds that a batch waits for more items. ``turn``: maximum number of items
        that a job adds to a batch before the next job's turn.
        """
        self.max_items, self._gather_s, self._turn = max_items, gather_s, turn
        self._jobs: deque[Job[Item]] = deque()
        self._is_woken = False
        self._changed = threading.Condition()

    def add(self, job: Job[Item]) -> bool:
        """Queue ``job``, or return False if the queue is full."""
        with self._changed:
            if self._waiting() + len(job.items) > self.max_items:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def take(
        self,
        max_items: int,
        timeout_s: float,
        fit_together: Callable[[list[Item]], bool] = lambda items: True,
        is_complete: Callable[[int], bool] = lambda waiting: False,
    ) -> list[Slot[Item]]:
        """Wait up to ``timeout_s`` for items. Return at most ``max_items`` of them for a batch.

        A job with more items is queued again after the other jobs. ``fit_together``: returns
        whether the last item of a list can join the others in a batch. A job whose next item does
        not fit keeps its position in the queue. ``is_complete``: returns whether this number of
        waiting items is enough to start a batch without waiting ``gather_s``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_woken, timeout_s)
            self._is_woken = False
            if not self._jobs:
                return []
            # Wait a moment for more items of the batch.
            self._changed.wait_for(lambda: is_complete(self._waiting()), self._gather_s)
            # The jobs take turns until the batch is full.
            batch: list[Slot[Item]] = []
            skipped: list[Job[Item]] = []
            while self._jobs and len(batch) < max_items:
                job = self._jobs.popleft()
                if job.is_abandoned:
                    continue
                if not fit_together([*(slot.item for slot in batch), job.items[job.started]]):
                    skipped.append(job)
                    continue
                start, room = job.started, max_items - len(batch)
                job.started = min(start + self._turn, start + room, len(job.items))
                batch += [Slot(job, index) for index in range(start, job.started)]
                if job.started < len(job.items):
                    self._jobs.append(job)
            self._jobs.extendleft(reversed(skipped))
            return batch

    def _waiting(self) -> int:
        return sum(len(job.items) - job.started for job in self._jobs if not job.is_abandoned)

    def wake(self) -> None:
        """End a wait of `take` for jobs, or make `take` call ``is_complete`` again."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def fail_all(self, error: Exception) -> None:
        """Report ``error`` to all waiting jobs and remove them."""
        with self._changed:
            for job in self._jobs:
                job.report(error)
            self._jobs.clear()
