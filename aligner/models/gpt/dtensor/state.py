"""Run state of a sharded transformers model, which can be loaded on any parallel layout."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.canonical import check_shape
from aligner.errors import CheckpointError
from aligner.models.gpt.dtensor.optimizer import ShardOptimizer
from aligner.models.gpt.dtensor.shards import ParameterShard, Shape, rows_of
from aligner.models.gpt.role.training_state import OwnedSlice

BACKEND = "dtensor"
WEIGHT = "weight"


def shard_state(
    shards: Sequence[ParameterShard], optimizer: ShardOptimizer | None
) -> dict[str, Any]:
    """Return weights and optimizer state of this process. The tensors are views, not copies.

    ``{"backend": name, "steps": number of optimizer steps or None, "slices": {name: slice}}``. A
    slice is ``{"shape": shape of the full parameter, "split": (split dimension or None, index of
    this rank's part, number of parts), "first_row": first row in the part, "tensors": {"weight",
    "exp_avg", "exp_avg_sq"}}``.
    """
    owned = _owned_slices(optimizer)
    slices = {}
    for shard in shards:
        moments = owned[shard.name].moments() if shard.name in owned else {}
        slices[shard.name] = {
            "shape": list(shard.shape),
            "split": _split(shard),
            "first_row": shard.rows.start,
            "tensors": {WEIGHT: shard.local, **moments},
        }
    steps = optimizer.steps if optimizer is not None else None
    return {"backend": BACKEND, "steps": steps, "slices": slices}


@torch.no_grad()
def load_shard_state(
    shards: Sequence[ParameterShard],
    optimizer: ShardOptimizer | None,
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Restore this process's weights and optimizer state from all `shard_state`, in rank order.
    Raises `CheckpointError` if another model or backend saved the states, or a slice is missing.
    """
    rank = shards[0].parallel.rank if shards else 0
    state = states[rank if rank < len(states) else 0]
    if state.get("backend") != BACKEND:
        raise CheckpointError(
            "the run state was not saved with policy.backend=dtensor. Set policy.backend to the "
            "backend that saved the state, or set exp_manager.explicit_log_dir to a new directory"
        )
    steps: int | None = state["steps"]
    owned = _owned_slices(optimizer)
    for shard in shards:
        tensors = _read(shard, states)
        shard.local.copy_(tensors.pop(WEIGHT))
        if shard.name in owned and steps is not None:
            owned[shard.name].set_moments(tensors, steps)
    if optimizer is not None and steps is not None:
        optimizer.resume_at(steps)


def _split(shard: ParameterShard) -> tuple[int | None, int, int]:
    """Return the split dimension, the index of this rank's part, and the number of parts."""
    if shard.split_dim is None:
        return None, 0, 1
    return shard.split_dim, shard.parallel.tp_rank, shard.parallel.config.tensor


def _owned_slices(optimizer: ShardOptimizer | None) -> dict[str, OwnedSlice]:
    if optimizer is None:
        return {}
    return {shard.name: owned for shard, owned in optimizer.owned_slices()}


def _read(shard: ParameterShard, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Assemble the tensors of one shard (see "tensors" in `shard_state`) from all slices."""
    ranges, rank = _index_ranges(shard.shape, _split(shard), shard.rows), shard.parallel.rank
    result: dict[str, Tensor] = {}
    missing = torch.ones([len(indices) for indices in ranges], dtype=torch.bool)
    # This rank's own state is first: it suffices if the layout has not changed.
    for saved_rank in sorted(range(len(states)), key=lambda index: (index != rank, index)):
        saved_slice = states[saved_rank]["slices"].get(shard.name)
        if saved_slice is None:
            raise CheckpointError(
                f"the run state does not contain {shard.name} of the model. If "
                "model.restore_from_path or model.peft was changed, set "
                "exp_manager.explicit_log_dir to a new directory"
            )
        check_shape(f"{shard.name} of the run state", saved_slice["shape"], shard.shape)
        tensors, first = saved_slice["tensors"], saved_slice["first_row"]
        rows = range(first, first + tensors[WEIGHT].shape[0])
        saved_ranges = _index_ranges(shard.shape, saved_slice["split"], rows)
        if saved_ranges == ranges:
            return dict(tensors)
        # Copy the overlap with this process's elements.
        overlap = [
            range(max(own.start, saved.start), min(own.stop, saved.stop))
            for own, saved in zip(ranges, saved_ranges, strict=True)
        ]
        if not all(overlap):
            continue
        target_index, source_index = _within(overlap, ranges), _within(overlap, saved_ranges)
        for kind, tensor in tensors.items():
            target = result.setdefault(kind, torch.empty(missing.shape, dtype=tensor.dtype))
            target[target_index] = tensor[source_index]
        missing[target_index] = False
        if not missing.any():
            break
    if missing.any():
        raise CheckpointError(
            f"the run state does not contain all elements of {shard.name}. Delete this state, so "
            "that the run resumes from an earlier state"
        )
    # This process can have no elements of the parameter.
    return result or {WEIGHT: torch.empty(missing.shape)}


def _index_ranges(shape: Shape, split: tuple[int | None, int, int], rows: range) -> list[range]:
    """Return the index range in each dimension of the full parameter, for ``rows`` of a part."""
    dim, part_index, parts = split
    ranges = [rows, *map(range, shape[1:])]
    if dim is not None:
        part = rows_of(shape[dim], part_index, parts)
        ranges[dim] = part if dim else range(part.start + rows.start, part.start + rows.stop)
    return ranges


def _within(inner: list[range], outer: list[range]) -> tuple[slice, ...]:
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in pairs)
