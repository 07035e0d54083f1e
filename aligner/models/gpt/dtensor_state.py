"""A sharded model's weights and Adam moments, saved on one layout and restored on any other.

Every process saves its local elements with their place: which tensor-parallel part, and which rows
of it. Restoring joins, one parameter at a time, the slices that the saving processes left
(memory-mapped files), and copies this process's elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.canonical import check_shape
from aligner.errors import CheckpointError
from aligner.models.gpt.dtensor_optimizer import ShardOptimizer
from aligner.models.gpt.dtensor_shards import ParameterShard
from aligner.models.gpt.optimizer import OwnedSlice

BACKEND = "dtensor"
WEIGHT = "weight"


def shard_state(
    shards: Sequence[ParameterShard], optimizer: ShardOptimizer | None
) -> dict[str, Any]:
    """What this process has to save; tensors are its memory.

    ``{"backend", "steps": optimizer steps or None, "slices": {name: {"shape": of the whole,
    "split": (dimension or None, part, parts), "first_row": in the part, "tensors": {"weight",
    "exp_avg", "exp_avg_sq"}}}}``.
    """
    moments = _moments(optimizer)
    slices = {}
    for shard in shards:
        split = (shard.split_dim, 0, 1)
        if shard.split_dim is not None:
            split = (shard.split_dim, shard.parallel.tp_rank, shard.parallel.config.tensor)
        kept = moments[shard.name].moments() if shard.name in moments else {}
        slices[shard.name] = {
            "shape": list(shard.shape),
            "split": split,
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
    for state in states:
        if state.get("backend") != BACKEND:
            raise CheckpointError(
                "the run state was not saved with policy.backend=dtensor; continue with the "
                "backend that saved it, or give another exp_manager.explicit_log_dir"
            )
    steps: int | None = states[0]["steps"]
    owned = _moments(optimizer)
    for shard in shards:
        pieces = [state["slices"].get(shard.name) for state in states]
        shard.local.copy_(_mine(shard, pieces, WEIGHT))
        mine = owned.get(shard.name)
        if mine is None or steps is None:
            continue
        kinds = {kind for piece in pieces if piece for kind in piece["tensors"]} - {WEIGHT}
        mine.set_moments({kind: _mine(shard, pieces, kind) for kind in sorted(kinds)}, steps)
    if optimizer is not None and steps is not None:
        optimizer.resume_at(steps)


def _moments(optimizer: ShardOptimizer | None) -> dict[str, OwnedSlice]:
    if optimizer is None:
        return {}
    return {shard.name: owned for shard, owned in optimizer.owned_slices()}


def _mine(shard: ParameterShard, pieces: Sequence[Mapping[str, Any] | None], kind: str) -> Tensor:
    """This process's elements out of the slices of all processes."""
    found = [piece for piece in pieces if piece is not None]
    if not found:
        raise CheckpointError(
            f"the model has {shard.name}, which the run state lacks; was model.restore_from_path "
            "changed? Use another exp_manager.explicit_log_dir"
        )
    check_shape(f"{shard.name} of the run state", found[0]["shape"], shard.shape)
    dim, _, count = found[0]["split"]
    parts = [_part(shard.name, found, kind, index) for index in range(count)]
    whole = parts[0] if dim is None else torch.cat(parts, dim=dim)
    check_shape(f"{shard.name} of the run state", whole.shape, shard.shape)
    return shard.share_of(whole)


def _part(name: str, pieces: Sequence[Mapping[str, Any]], kind: str, index: int) -> Tensor:
    """Part ``index`` of the tensor-parallel split that was saved, out of its runs of rows."""
    by_row = {
        piece["first_row"]: piece["tensors"][kind]
        for piece in pieces
        if piece["split"][1] == index and piece["tensors"][WEIGHT].numel() > 0
    }
    if not by_row:
        raise CheckpointError(
            f"the run state lacks part {index} of {name}; resume from an earlier state"
        )
    return torch.cat([by_row[row] for row in sorted(by_row)])
