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
    """The items of one request, such as prompts."""

    items: Sequence[Item]
    report: Callable[[Any], None]  # called by the model's thread with each result or an error
    started: int = 0  # number of items that the model has started, in the order of `items`
    ended: int = 0  # number of items whose result is complete
    is_abandoned: bool = False  # no client waits for the results


@dataclass
class Slot(Generic[Item]):
    """An item of a job that the model processes now."""

    job: Job[Item]
    index: int
    reported: int = 0  # number of reported parts of the result, such as tokens
    is_ended: bool = False

    @property
    def item(self) -> Item:
        """The item itself."""
        return self.job.items[self.index]

    @property
    def is_wanted(self) -> bool:
        """False if the item has ended or its job was abandoned."""
        return not (self.is_ended or self.job.is_abandoned)

    def report(self, result: Any, *, parts: int = 1, is_last: bool = True) -> None:
        """Report the next ``parts`` (such as tokens) of the item's result to the job."""
        self.reported += parts
        self.is_ended = is_last
        self.job.ended += is_last
        self.job.report(result)

    def fail(self, error: Exception) -> None:
        """Report an error as the item's result, unless the item has ended."""
        if not self.is_ended:
            self.job.report(error)


class JobQueue(Generic[Item]):
    """Queue of jobs for a model. The jobs take turns, so that a large job does not block others."""

    def __init__(self, max_items: int, gather_s: float = 0.005, turn: int = 1) -> None:
        """Create a queue for at most ``max_items`` waiting items.

        ``gather_s``: seconds to wait for more items before a batch starts. ``turn``: maximum number
        of items that a job adds to a batch before it is another job's turn.
        """
        self.max_items, self._gather_s, self._turn = max_items, gather_s, turn
        self._jobs: deque[Job[Item]] = deque()
        self._is_woken = False
        self._changed = threading.Condition()

    def add(self, job: Job[Item]) -> bool:
        """Add a job. Return False if the queue is full."""
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
        """Wait up to ``timeout_s`` seconds for items, and return them as a batch.

        A job with remaining items goes to the end of the queue.

        Args:
            max_items: maximum number of items in the batch.
            timeout_s: maximum number of seconds to wait for the first item.
            fit_together: whether the last item of a list can join the others in a batch. A job
                whose next item does not fit keeps its place in the queue.
            is_complete: whether this number of waiting items is enough to start without a delay.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_woken, timeout_s)
            self._is_woken = False
            if not self._jobs:
                return []
            # Wait `gather_s` for more items of the batch.
            self._changed.wait_for(lambda: is_complete(self._waiting()), self._gather_s)
            # The jobs take turns until the batch is full. A job gives at most `turn` items.
            batch: list[Slot[Item]] = []
            skipped: list[Job[Item]] = []  # jobs whose next item does not fit
            while self._jobs and len(batch) < max_items:
                job = self._jobs.popleft()
                if job.is_abandoned:
                    continue
                next_item = job.items[job.started]
                if not fit_together([*(slot.item for slot in batch), next_item]):
                    skipped.append(job)
                    continue
                start = job.started
                count = min(self._turn, max_items - len(batch), len(job.items) - start)
                job.started += count
                batch += [Slot(job, start + offset) for offset in range(count)]
                if job.started < len(job.items):
                    self._jobs.append(job)
            self._jobs.extendleft(reversed(skipped))  # back to the front, in their order
            return batch

    def _waiting(self) -> int:
        return sum(len(job.items) - job.started for job in self._jobs if not job.is_abandoned)

    def wake(self) -> None:
        """Make a waiting `take` return, or call ``is_complete`` again."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def fail_all(self, error: Exception) -> None:
        """Remove all waiting jobs and report ``error`` to them."""
        with self._changed:
            for job in self._jobs:
                job.report(error)
            self._jobs.clear()
