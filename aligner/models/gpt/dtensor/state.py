"""A sharded model's weights and Adam moments, saved on one layout and restored on any other."""

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
    """Return the state that this process saves. Its tensors share the process's memory.

    ``{"backend", "steps": optimizer steps or None, "slices": {name: {"shape": full shape, "split":
    (dimension or None, part, parts), "first_row": in the part, "tensors": {"weight", "exp_avg",
    "exp_avg_sq"}}}}``.
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
    """Restore this process's shard bit for bit from the states of all processes in rank order.

    Raises:
        CheckpointError: the state is of another model or backend, or a slice is missing.
    """
    rank = shards[0].parallel.rank if shards else 0
    state = states[rank if rank < len(states) else 0]
    if state.get("backend") != BACKEND:
        raise CheckpointError(
            "the run state was not saved with policy.backend=dtensor. Continue with the backend "
            "that saved it, or use another exp_manager.explicit_log_dir"
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
    """Return the dimension that tensor parallelism splits, this rank's index and the parts."""
    if shard.split_dim is None:
        return None, 0, 1
    return shard.split_dim, shard.parallel.tp_rank, shard.parallel.config.tensor


def _owned_slices(optimizer: ShardOptimizer | None) -> dict[str, OwnedSlice]:
    if optimizer is None:
        return {}
    return {shard.name: owned for shard, owned in optimizer.owned_slices()}


def _read(shard: ParameterShard, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Read this process's elements by kind from the slices of all processes."""
    box, rank = _box(shard.shape, _split(shard), shard.rows), shard.parallel.rank
    result: dict[str, Tensor] = {}
    missing = torch.ones([len(indices) for indices in box], dtype=torch.bool)
    for saved_rank in sorted(range(len(states)), key=lambda index: (index != rank, index)):
        piece = states[saved_rank]["slices"].get(shard.name)
        if piece is None:
            raise CheckpointError(
                f"the run state does not contain {shard.name} of the model. If "
                "model.restore_from_path or model.peft was changed, use another "
                "exp_manager.explicit_log_dir"
            )
        check_shape(f"{shard.name} of the run state", piece["shape"], shard.shape)
        tensors, first = piece["tensors"], piece["first_row"]
        rows = range(first, first + tensors[WEIGHT].shape[0])
        saved_box = _box(shard.shape, piece["split"], rows)
        if saved_box == box:  # the same layout
            return dict(tensors)
        # Copy the overlap with this process's elements.
        overlap = [
            range(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(box, saved_box, strict=True)
        ]
        if not all(overlap):
            continue
        target_index, source_index = _within(overlap, box), _within(overlap, saved_box)
        for kind, tensor in tensors.items():
            target = result.setdefault(kind, torch.empty(missing.shape, dtype=tensor.dtype))
            target[target_index] = tensor[source_index]
        missing[target_index] = False
        if not missing.any():
            break
    if missing.any():
        raise CheckpointError(
            f"the run state does not contain a part of {shard.name}. Resume from an earlier state"
        )
    # This process can have no elements of the parameter.
    return result or {WEIGHT: torch.empty(missing.shape)}


def _box(shape: Shape, split: tuple[int | None, int, int], rows: range) -> list[range]:
    """Return the indices in each dimension of the full tensor of ``rows`` of a part (`_split`)."""
    dim, part_index, parts = split
    box = [rows, *map(range, shape[1:])]
    if dim is not None:
        part = rows_of(shape[dim], part_index, parts)
        box[dim] = part if dim else range(part.start + rows.start, part.start + rows.stop)
    return box


def _within(inner: list[range], outer: list[range]) -> tuple[slice, ...]:
    """Return the slices of ``outer`` that select ``inner``."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in pairs)
