"""Loop of a sampling engine, in the main thread: answers queued rows in batches.

    JobQueue ─ rows ─► rank 0 ─ batch to all ranks ─► engine ─ tokens ─► rank 0 ─ reports ─► jobs

Rank 0 owns the queue. The other ranks wait for rank 0's batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.config import SamplingOptions
from aligner.data.batches import pad_right
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.pool import engine_failure
from aligner.errors import WorkerError
from aligner.generation.rows import EndKind, Progress, Row, RowJob, batch_options, fit_together
from aligner.http.queue import ENDING, JobQueue, Slot
from aligner.models.interfaces import GenerationInterface
from aligner.parallel.collectives import from_rank_zero, is_rank_zero

# Ranks wait for rank 0 in a collective. Rank 0 ends an idle wait at this interval.
_HEARTBEAT_S = 0.5
_RowSlot = Slot[Row]
_Listener = Callable[[int, int, float], None]


class _Batch(NamedTuple):
    """Rows of a batch, as sent to every rank."""

    prompts: list[list[int]]
    sample_ids: list[int]
    options: SamplingOptions | None  # None: options of the engine


class _AbandonedError(Exception):
    """No job waits for the batch any more, or the server is stopping."""


@dataclass(frozen=True)
class ServingEngine:
    """Loop that answers queued rows with an engine that is ready to generate.

    ``survives``, called on all ranks, returns whether the engine can be used after an exception.
    The default returns False if there are other ranks (their state is unknown) or a worker failed.
    """

    generation: GenerationInterface
    queue: JobQueue[Row]
    rows: int  # maximum batch size
    positions: int  # of the model
    pad_id: int
    end_ids: frozenset[int]  # tokens that end an answer
    seed: int  # random numbers depend only on the seed, the prompt and the sample id
    listens: bool  # the engine reports every token when it is sampled
    has_peers: bool  # other ranks take part, so a started batch must be completed
    survives: Callable[[Exception], bool] | None = None
    is_complete: Callable[[int], bool] = lambda rows: False  # start without waiting for more rows

    def serve(self, is_stopping: Callable[[], bool]) -> None:
        """Answer rows until ``is_stopping()`` is true on rank 0. All ranks call this method.

        If a batch fails, its jobs get the exception. An exception after which the engine cannot be
        used is also raised.
        """
        fit = partial(fit_together, positions=self.positions)
        while True:
            # Rank 0 chooses the batch. None ends the loop on all ranks.
            slots: list[_RowSlot] = []
            stops = is_stopping()
            if is_rank_zero() and not stops:
                slots = self.queue.take(self.rows, _HEARTBEAT_S, fit, self.is_complete)
            rows = [slot.item for slot in slots]
            ids = [row.prompt for row in rows], [row.sample_id for row in rows]
            batch = from_rank_zero(None if stops else _Batch(*ids, batch_options(rows)))
            if batch is None:
                return
            if batch.prompts:
                self._answer(batch, slots, is_stopping)

    def _answer(
        self, batch: _Batch, slots: list[_RowSlot], is_stopping: Callable[[], bool]
    ) -> None:
        try:
            output = self._generate(batch, slots, is_stopping)
        except _AbandonedError:
            for slot in slots:
                slot.fail(ConnectionAbortedError(ENDING))
        except Exception as error:
            if self.survives is not None:
                survives = self.survives(error)
            else:
                survives = not (self.has_peers or isinstance(error, WorkerError))
            failure = engine_failure(error)
            for slot in slots:
                if survives and slot.is_wanted and isinstance(slot.job, RowJob):
                    slot.job.failure = failure
                slot.fail(error)
            if not survives:
                raise
        else:
            for index, slot in enumerate(slots):
                _finish(slot, output, index)

    def _generate(
        self, batch: _Batch, slots: list[_RowSlot], is_stopping: Callable[[], bool]
    ) -> BatchedDataDict:
        ids, lengths = pad_right(batch.prompts, self.pad_id)
        columns = {"input_ids": ids, "input_lengths": lengths}
        columns["sample_ids"] = torch.tensor(batch.sample_ids)
        options: dict[str, Any] = {}
        if batch.options is not None:
            options["sampling_options"] = batch.options
        if self.listens:
            options["listener"] = self._listener(slots, is_stopping)
        output = self.generation.generate(BatchedDataDict(columns), seed=self.seed, **options)
        return output.to("cpu")

    def _listener(self, slots: list[_RowSlot], is_stopping: Callable[[], bool]) -> _Listener:
        # With different limits, the engine may sample for the longest after all rows have ended.
        longest = max((slot.item.longest for slot in slots), default=0)
        is_cut = any(slot.item.longest < longest for slot in slots)

        def listen(index: int, token: int, logprob: float) -> None:
            if not slots:  # not rank 0
                return
            slot = slots[index]
            end: EndKind | None = "length" if slot.reported + 1 >= slot.item.longest else None
            _report(slot, [token], [logprob], "stop" if token in self.end_ids else end)
            if self.has_peers or (not is_cut and all(row_slot.is_ended for row_slot in slots)):
                return  # the batch ends without intervention
            if is_stopping() or not any(row_slot.is_wanted for row_slot in slots):
                raise _AbandonedError

        return listen


def _report(
    slot: _RowSlot,
    ids: list[int],
    logprobs: list[float],
    end: EndKind | None,
    kept_ids: Tensor | None = None,
) -> None:
    """Report new tokens of a row. Tokens after the row's end are ignored."""
    if not slot.is_ended and (ids or end):
        progress = Progress(slot.index, ids, logprobs, end, kept_ids)
        slot.report(progress, parts=len(ids), is_last=end is not None)


def _finish(slot: _RowSlot, output: BatchedDataDict, index: int) -> None:
    """Report the unreported tokens of a row, and its end. Answers that are too long are cut."""
    begin, longest = len(slot.item.prompt), slot.item.longest
    length = int(output["unpadded_sequence_lengths"][index]) - begin
    new = slice(begin + slot.reported, begin + min(length, longest))
    # Copy, because sending a view sends the whole tensor.
    kept_ids = output["kept_ids"][index, new].clone() if "kept_ids" in output else None
    stopped = length <= longest and bool(output["is_end"][index])
    _report(
        slot,
        output["output_ids"][index, new].tolist(),
        output["logprobs"][index, new].tolist(),
        "stop" if stopped else "length",
        kept_ids,
    )
