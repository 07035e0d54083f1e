"""Conversations that go on while the policy trains.

They take many rounds of the engine and their environments: a thread conducts those of the next
rollout, all with the weights from before. Only engines on Ray work while the policy trains, and
there one process drives, so the thread takes part in no collective operation.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from aligner.config import SamplingOptions
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import AlignerError
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface


class ConversationsAhead:
    """Conversations that a thread conducts while the policy trains (`PendingGeneration`)."""

    def __init__(
        self,
        collect: Callable[[GenerationInterface], BatchedDataDict],
        generation: BackgroundGeneration,
    ) -> None:
        """Begin ``collect``; ``generation`` has the weights that it samples with.

        Until `result` or `abandon` returns, nobody else may call it or the environments.
        """
        self._abandoned = Event()
        thread = ThreadPoolExecutor(1, thread_name_prefix="conversations")
        self._future = thread.submit(collect, _Rounds(generation, self._abandoned))
        thread.shutdown(wait=False)

    def result(self) -> BatchedDataDict:
        """Wait for all of them; what ``collect`` raised is raised."""
        return self._future.result()

    def abandon(self) -> None:
        """End them after the round that is under way; an error of theirs is nobody's any more."""
        self._abandoned.set()
        self._future.exception()


class _AbandonedError(AlignerError):
    """The rollout will not be taken."""


class _Rounds(GenerationInterface):
    """An engine that works while the policy trains: its weights stay those it has."""

    def __init__(self, engine: BackgroundGeneration, abandoned: Event) -> None:
        self._engine, self._abandoned = engine, abandoned

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing: newer weights may be there already, which are the next rollout's."""
        return True

    def generate(
        self,
        data: BatchedDataDict,
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """A round of a training rollout, which has the engine's own options and a seed."""
        assert seed is not None
        assert (greedy, sampling_options) == (False, None)
        if self._abandoned.is_set():
            raise _AbandonedError
        return self._engine.generate_in_background(data, seed=seed).result()

    def recover(self) -> bool:
        """The engine's own answer."""
        return self._engine.recover()

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing: the engine goes on to the next rollout."""
        return True
