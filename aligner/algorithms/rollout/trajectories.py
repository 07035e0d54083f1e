"""Conversion of conversations to a rollout batch, and the errors after which they may restart."""

import logging
import traceback
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from aligner.data.prompts import pad_right
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.trajectory import EndReason, KeptTokens, Trajectory
from aligner.errors import AlignerError, WorkerError
from aligner.models.interfaces import GenerationInterface
from aligner.parallel.collectives import gather_objects
from aligner.types import PAD_VALUES

log = logging.getLogger(__name__)

END_REASONS: tuple[EndReason, ...] = get_args(EndReason)

# Errors of the request or the code, not of the engine: the next call would fail again.
_CALLER_ERRORS = (
    *(AttributeError, LookupError, NameError, TypeError, ValueError),
    *(AssertionError, NotImplementedError),
)


def engine_survives(generation: GenerationInterface, error: Exception) -> bool:
    """Return whether conversations may restart after ``generate`` raised on all ranks.

    False if the error on any rank comes from the request instead of the engine, or if ``generate``
    cannot be called again. Call this function on all ranks after ``generate`` has raised on all
    ranks: a worker group raises one worker's error everywhere, but ranks that generate together may
    still wait for each other. If True, memory of the failed call, such as a cache on the device, is
    released.
    """
    if isinstance(error, AlignerError):
        of_engine = isinstance(error, WorkerError)
    else:
        of_engine = not isinstance(error, _CALLER_ERRORS)
    if not (generation.recover() and all(gather_objects(of_engine))):
        return False
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return True


def rollout_batch(
    data: BatchedDataDict,
    rows: Sequence[Trajectory],
    pad_id: int,
    *,
    with_positions: bool,
    unscored: Literal["zero", "mask"] = "zero",
) -> BatchedDataDict:
    """Return a rollout batch (`aligner.types`) of conversations, up to ``generation_logprobs``.

    Args:
        data: a `aligner.algorithms.rollout.rollout.prompts_batch` with the rows of ``rows``.
        rows: the conversations.
        pad_id: id of the padding on the right.
        with_positions: whether rows may contain several sequences. If so, the batch contains
            ``position_ids`` int64 [B, S], which restart at each sequence.
        unscored: see `EnvironmentConfig`. A conversation that its environment ended without a
            reward does not count in any case.
    """
    # Unscored conversations that ended for these reasons count with reward 0.
    counted = {"failed"} if unscored == "mask" else {"failed", "max_turns", "max_tokens"}
    counts = [float(row.is_scored or row.end_reason in counted) for row in rows]
    # Columns per token, padded to the longest row.
    ids, lengths = pad_right([row.ids[: row.length] for row in rows], pad_id)
    width = ids.shape[1]
    turn_ids = _padded([row.turn_ids[: row.length] for row in rows], width, torch.int64)
    logprobs = _padded([row.logprobs[: row.length] for row in rows], width, torch.float32)
    optional: dict[str, Tensor] = {}
    if with_positions:
        optional["position_ids"] = _padded([row.positions for row in rows], width, torch.int64)
    if any(row.kept_tokens for row in rows):
        optional["kept_ids"] = _kept_ids([row.kept_tokens for row in rows], width)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            **optional,
            "prompt_lengths": torch.tensor([row.prompt_length for row in rows]),
            "sample_ids": data["sample_ids"],
            "is_end": torch.tensor([row.end_reason == "done" for row in rows]),
            "token_mask": (turn_ids > 0).float(),
            "sample_mask": torch.tensor(counts),
            "generation_logprobs": logprobs,
            "turn_ids": turn_ids,
            "turn_rewards": _padded([row.rewards for row in rows], width, torch.float32),
            "is_scored": torch.tensor([float(row.is_scored) for row in rows]),
            "prompts": [row.prompt for row in rows],
            "responses": [row.text for row in rows],
            "turns": [[vars(turn).copy() for turn in row.turns] for row in rows],
            "reward_parts": [row.parts for row in rows],
            "end_reasons": [row.end_reason for row in rows],
            "forks": [row.forks for row in rows],
            "failures": [row.failures for row in rows],
            "ground_truths": data["ground_truths"],
            "columns": data["columns"],
        }
    )


def _kept_ids(rows: Sequence[Sequence[KeptTokens]], width: int) -> Tensor:
    """Return int32 [B, width, K], the kept ids at sampled tokens and -1 elsewhere."""
    size = next(kept.ids.shape[1] for row in rows for kept in row)
    result = torch.full((len(rows), width, size), PAD_VALUES["kept_ids"], dtype=torch.int32)
    for index, row in enumerate(rows):
        for start, ids in row:
            result[index, start : start + len(ids)] = ids
    return result


def _padded(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    """Return the rows as [B, width] of ``dtype``, right-padded with 0."""
    result = torch.zeros(len(rows), width, dtype=dtype)
    for index, row in enumerate(rows):
        result[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return result
