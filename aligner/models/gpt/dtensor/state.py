"""A sharded model's weights and Adam moments, saved on one layout and restored on any other.

Every process saves its local elements with their place: which tensor-parallel part, and which rows
of it. Restoring copies, one parameter at a time, this process's elements out of the slices that the
saving processes left (memory-mapped files, its own first).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.canonical import check_shape
from aligner.errors import CheckpointError
from aligner.models.gpt.dtensor.optimizer import ShardOptimizer
from aligner.models.gpt.dtensor.shards import ParameterShard, Shape, rows_of
from aligner.models.gpt.role.optimizer_step import OwnedSlice

BACKEND = "dtensor"
WEIGHT = "weight"


def shard_state(
    shards: Sequence[ParameterShard], optimizer: ShardOptimizer | None
) -> dict[str, Any]:
    """State that this process has to save; tensors are its memory.

    ``{"backend", "steps": optimizer steps or None, "slices": {name: {"shape": of the whole,
    "split": (dimension or None, part, parts), "first_row": in the part, "tensors": {"weight",
    "exp_avg", "exp_avg_sq"}}}}``.
    """
    moments = _moments(optimizer)
    slices = {}
    for shard in shards:
        kept = moments[shard.name].moments() if shard.name in moments else {}
        slices[shard.name] = {
            "shape": list(shard.shape),
            "split": _split(shard),
            "first_row": shard.rows.start,
            "tensors": {WEIGHT: shard.local, **kept},
        }
    steps = optimizer.steps if optimizer is not None else None
    return {"backend": BACKEND, "steps": steps, "slices": slices}


@torch.no_grad()
def load_shard_state(
    shards: Sequence[ParameterShard],
    optimizer: ShardOptimizer | None,
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Restore this process's share from what all processes of the saving run gave, in rank order.

    Every bit comes back. `CheckpointError` where the state is another model's or backend's, or a
    slice is missing.
    """
    rank = shards[0].parallel.rank if shards else 0
    own = states[rank if rank < len(states) else 0]
    if own.get("backend") != BACKEND:
        raise CheckpointError(
            "the run state was not saved with policy.backend=dtensor; continue with the "
            "backend that saved it, or give another exp_manager.explicit_log_dir"
        )
    steps: int | None = own["steps"]
    owned = _moments(optimizer)
    for shard in shards:
        found = _mine(shard, states)
        shard.local.copy_(found.pop(WEIGHT))
        mine = owned.get(shard.name)
        if mine is not None and steps is not None:
            mine.set_moments(found, steps)
    if optimizer is not None and steps is not None:
        optimizer.resume_at(steps)


def _split(shard: ParameterShard) -> tuple[int | None, int, int]:
    """Dimension that tensor parallelism splits, the part that is held, and the parts."""
    if shard.split_dim is None:
        return None, 0, 1
    return shard.split_dim, shard.parallel.tp_rank, shard.parallel.config.tensor


def _moments(optimizer: ShardOptimizer | None) -> dict[str, OwnedSlice]:
    if optimizer is None:
        return {}
    return {shard.name: owned for shard, owned in optimizer.owned_slices()}


def _mine(shard: ParameterShard, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """This process's elements by kind, out of the slices of all processes."""
    rows, columns = _placed(shard.shape, *_split(shard), shard.rows)
    rank = shard.parallel.rank
    result: dict[str, Tensor] = {}
    missing = torch.ones(len(rows), len(columns), dtype=torch.bool)
    for number in sorted(range(len(states)), key=lambda number: (number != rank, number)):
        piece = states[number]["slices"].get(shard.name)
        if piece is None:
            raise CheckpointError(
                f"the model has {shard.name}, which the run state lacks; was "
                "model.restore_from_path changed? Use another exp_manager.explicit_log_dir"
            )
        check_shape(f"{shard.name} of the run state", piece["shape"], shard.shape)
        tensors = piece["tensors"]
        first, held = piece["first_row"], tensors[WEIGHT].shape[0]
        saved_rows = range(first, first + held)
        dim, place, count = piece["split"]
        its_rows, its_columns = _placed(tuple(piece["shape"]), dim, place, count, saved_rows)
        if (its_rows, its_columns) == (rows, columns):  # one's own
            return {kind: tensor.view(shard.local.shape) for kind, tensor in tensors.items()}
        here, there = _overlap(rows, its_rows), _overlap(columns, its_columns)
        if not (here and there):
            continue
        for kind, tensor in tensors.items():
            target = result.setdefault(kind, torch.empty(missing.shape, dtype=tensor.dtype))
            source = tensor.reshape(len(its_rows), -1)
            target[_within(here, rows), _within(there, columns)] = source[
                _within(here, its_rows), _within(there, its_columns)
            ]
        missing[_within(here, rows), _within(there, columns)] = False
        if not missing.any():
            break
    if missing.any():
        raise CheckpointError(
            f"the run state lacks a part of {shard.name}; resume from an earlier state"
        )
    if not result:  # a process without elements of it
        return {WEIGHT: torch.empty(shard.local.shape)}
    return {kind: tensor.view(shard.local.shape) for kind, tensor in result.items()}


def _placed(
    shape: Shape, dim: int | None, place: int, count: int, rows: range
) -> tuple[range, range]:
    """Place in the whole of ``rows`` of part ``place`` of ``count`` along ``dim``."""
    width = math.prod(shape[1:])
    if dim is None:
        return rows, range(width)
    part = rows_of(shape[dim], place, count)
    if dim == 0:
        return range(part.start + rows.start, part.start + rows.stop), range(width)
    inner = width // shape[1]
    return rows, range(part.start * inner, part.stop * inner)


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(some: range, of: range) -> slice:
    return slice(some.start - of.start, some.stop - of.start)
