"""Conversations that go on while the policy trains.

They take many batches of the engine and their environments: a thread collects the next rollout, all
with the weights from before. Only engines on Ray work while the policy trains, and there one
process drives, so the thread takes part in no collective operation.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from aligner.distributed.batched_data_dict import BatchedDataDict


class ConversationsAhead:
    """Conversations that a thread collects while the policy trains (`PendingGeneration`)."""

    def __init__(self, collect: Callable[[Callable[[], bool]], BatchedDataDict]) -> None:
        """Begin ``collect``, which ends early once the function that it is given returns True.

        Until `result` or `abandon` returns, nobody else may call the engine or the environments.
        """
        self._abandoned = Event()
        thread = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._future = thread.submit(collect, self._abandoned.is_set)
        thread.shutdown(wait=False)

    def result(self) -> BatchedDataDict:
        """Wait for all of them; what ``collect`` raised is raised."""
        return self._future.result()

    def abandon(self) -> None:
        """End them after the batch that is under way; an error of theirs does not matter then."""
        self._abandoned.set()
        self._future.exception()
