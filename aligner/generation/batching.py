"""The engine's side of a server: requests that wait are generated in batches, in the main thread.

All ranks of a run take part; rank 0 has the requests, and the others wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.config import SamplingOptions
from aligner.data.prompts import pad_right
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.pool import engine_failure
from aligner.errors import WorkerError
from aligner.generation.rows import EndKind, Progress, Row, RowJob, batch_options, fit_together
from aligner.http.queue import ENDING, JobQueue, Slot
from aligner.models.interfaces import GenerationInterface
from aligner.parallel.collectives import from_rank_zero, is_rank_zero

# The other ranks wait for rank 0 in a collective; it ends an idle wait this often.
_HEARTBEAT_S = 0.5
_RowSlot = Slot[Row]
_Listener = Callable[[int, int, float], None]


class _Batch(NamedTuple):
    """Rows as every rank needs to know them."""

    prompts: list[list[int]]
    sample_ids: list[int]
    options: SamplingOptions | None  # None: the engine's own

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_Batch":
        """The rows of a batch."""
        prompts, sample_ids = [row.prompt for row in rows], [row.sample_id for row in rows]
        return cls(prompts, sample_ids, batch_options(rows))


class _NobodyWaitsError(Exception):
    """Nobody waits for the batch any more, or the server is to stop."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings by which an engine is asked.

    ``rows``: most answers of a batch. ``positions``: of the model. ``seed``: of the random numbers,
    which depend on it, the prompt and the sample id only. ``end_ids``: tokens that end an answer.
    ``listens``: the engine tells of every token as it is sampled. ``has_peers``: other ranks take
    part, so a batch that has begun must be brought to its end.
    """

    rows: int
    positions: int
    pad_id: int
    end_ids: frozenset[int]
    seed: int
    listens: bool
    has_peers: bool


class ServingEngine:
    """Answers what waits, with an engine that is ready to generate."""

    def __init__(
        self,
        generation: GenerationInterface,
        queue: JobQueue[Row],
        settings: EngineSettings,
        survives: Callable[[Exception], bool] | None = None,
        is_complete: Callable[[int], bool] = lambda waiting: False,
    ) -> None:
        """Nothing is asked yet.

        ``is_complete``: whether a batch waits for no more rows than so many.

        ``survives``: whether the engine may be asked again after what it raised, on every rank; by
        default it may unless there are other ranks, whose state is then unknown, or a worker
        failed.
        """
        self._generation, self._queue, self._settings = generation, queue, settings
        self._is_complete = is_complete
        self._survives = survives or (
            lambda error: not (settings.has_peers or isinstance(error, WorkerError))
        )

    def serve(self, is_stopping: Callable[[], bool]) -> None:
        """Answer until ``is_stopping`` on rank 0; collective.

        A batch that fails is reported to those who asked; an error that the engine does not survive
        is raised.
        """
        fit = partial(fit_together, positions=self._settings.positions)
        while True:
            slots: list[_RowSlot] = []
            stops = is_stopping()
            if is_rank_zero() and not stops:
                rows = self._settings.rows
                slots = self._queue.take(rows, _HEARTBEAT_S, fit, self._is_complete)
            batch = from_rank_zero(None if stops else _Batch.of([slot.item for slot in slots]))
            if batch is None:
                return
            if batch.prompts:
                self._answer(batch, slots, is_stopping)

    def _answer(
        self, batch: _Batch, slots: list[_RowSlot], is_stopping: Callable[[], bool]
    ) -> None:
        try:
            output = self._generated(batch, slots, is_stopping)
        except _NobodyWaitsError:
            for slot in slots:
                slot.fail(ConnectionAbortedError(ENDING))
        except Exception as error:
            survives = self._survives(error)
            failure = engine_failure(error)
            for slot in slots:
                if survives and slot.is_wanted and isinstance(slot.job, RowJob):
                    slot.job.failure = failure
                slot.fail(error)
            if not survives:
                raise
        else:
            for number, slot in enumerate(slots):
                _finish(slot, output, number)

    def _generated(
        self, batch: _Batch, slots: list[_RowSlot], is_stopping: Callable[[], bool]
    ) -> BatchedDataDict:
        ids, lengths = pad_right(batch.prompts, self._settings.pad_id)
        columns = {"input_ids": ids, "input_lengths": lengths}
        columns["sample_ids"] = torch.tensor(batch.sample_ids)
        further: dict[str, Any] = {}
        if batch.options is not None:
            further["sampling_options"] = batch.options
        if self._settings.listens:
            further["listener"] = self._listener(slots, is_stopping)
        output = self._generation.generate(
            BatchedDataDict(columns), seed=self._settings.seed, **further
        )
        return output.to("cpu")

    def _listener(self, slots: list[_RowSlot], is_stopping: Callable[[], bool]) -> _Listener:
        ends, may_leave = self._settings.end_ids, not self._settings.has_peers
        longest = max((slot.item.longest for slot in slots), default=0)
        is_cut = any(slot.item.longest < longest for slot in slots)

        def listen(number: int, token: int, logprob: float) -> None:
            if not slots:  # another rank
                return
            slot = slots[number]
            end: EndKind | None = "length" if slot.reported + 1 >= slot.item.longest else None
            _report(slot, [token], [logprob], "stop" if token in ends else end)
            if not may_leave or (not is_cut and all(each.is_ended for each in slots)):
                return  # it comes to its end by itself
            if is_stopping() or not any(each.is_wanted for each in slots):
                raise _NobodyWaitsError

        return listen


def _report(
    slot: _RowSlot,
    ids: list[int],
    logprobs: list[float],
    end: EndKind | None,
    kept: Tensor | None = None,
) -> None:
    """Report further tokens of a row; tokens after its end are ignored."""
    if not slot.is_ended and (ids or end):
        progress = Progress(slot.index, ids, logprobs, end, kept)
        slot.report(progress, parts=len(ids), is_last=end is not None)


def _finish(slot: _RowSlot, output: BatchedDataDict, number: int) -> None:
    """Report the tokens of a row that were not reported, and its end; longer answers are cut."""
    begin, longest = len(slot.item.prompt), slot.item.longest
    whole = int(output["unpadded_sequence_lengths"][number]) - begin
    new = slice(begin + slot.reported, begin + min(whole, longest))
    # A copy: a view is sent with all that it is a part of.
    kept = output["kept_ids"][number, new].clone() if "kept_ids" in output else None
    stopped = whole <= longest and bool(output["is_end"][number])
    _report(
        slot,
        output["output_ids"][number, new].tolist(),
        output["logprobs"][number, new].tolist(),
        "stop" if stopped else "length",
        kept,
    )
