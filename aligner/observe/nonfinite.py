"""Evidence of a loss or gradient that is NaN or infinite: which samples, at which step."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.durable import storage_error, unused_path, write_json
from aligner.checkpoint.run_state.tree import normalise, write_tree
from aligner.distributed.step import current_step


def nonfinite_names(scalars: Mapping[str, float | Tensor]) -> list[str]:
    """Names of the float scalars (loss, gradient norm, …) that are NaN or infinite."""
    return [name for name, value in scalars.items() if not math.isfinite(float(value))]


def offending_rows(batch: Mapping[str, Any]) -> Tensor:
    """Bool [B]: rows of which any floating-point tensor of the batch holds NaN or infinity.

    When no row does (the overflow arose inside the model), all rows are suspects.
    """
    rows = batch["input_ids"].shape[0]
    bad = torch.zeros(rows, dtype=torch.bool)
    for value in batch.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:1] == (rows,):
            bad |= ~torch.isfinite(value.detach().cpu()).reshape(rows, -1).all(dim=1)
    return bad if bad.any() else torch.ones(rows, dtype=torch.bool)


def write_nonfinite(
    folder: Path,
    role: str,
    scalars: Mapping[str, float | Tensor],
    batch: Mapping[str, Any],
    texts: Sequence[str] | None = None,
    *,
    update: int = 0,
    updates: int = 0,
    rank: int = 0,
) -> Path:
    """Write the samples behind a non-finite number; return the JSON file to look at.

    ``<folder>/nonfinite/step_000012_policy_update_000_rank_00000.json`` holds the scalars and, for
    each offending row, its index, its per-sample numbers and its text; the ``.pt`` beside it holds
    all tensors of those rows (``torch.load(..., weights_only=True)``). Every rank writes its own.
    The step is the run's (`aligner.distributed.step`).

    Args:
        folder: directory of the run.
        role: whose update it was: policy, critic.
        scalars: what was not finite, and whatever else helps (loss, grad_norm, lr).
        batch: rows of `aligner.types`; needs ``input_ids``.
        texts: decoded prompt and response of each row, None: not decoded.
        update: which mini-batch of the role's pass over the rollout, from 0.
        updates: optimizer updates that the role has made in its life.
    """
    rows = offending_rows(batch)
    size = rows.shape[0]
    tensors = {
        name: value.detach().cpu()[rows]
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[:1] == (size,)
    }
    report = {
        "step": current_step(),
        "role": role,
        "update": update,
        "updates_made": updates,
        "rank": rank,
        "not_finite": nonfinite_names(scalars),
        "scalars": {name: repr(float(value)) for name, value in scalars.items()},
        "samples": [
            _row(row, place, tensors, texts) for place, row in enumerate(rows.nonzero()[:, 0])
        ],
    }
    name = f"step_{current_step():06d}_{role}_update_{update:03d}_rank_{rank:05d}"
    # Evidence is never written over (a second pass).
    path = unused_path(folder / "nonfinite" / f"{name}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path.parent, error) from error
    write_tree(path.with_suffix(".pt"), normalise(tensors, "batch"))
    write_json(path, report)
    return path


def _row(
    row: Tensor, place: int, tensors: Mapping[str, Tensor], texts: Sequence[str] | None
) -> dict[str, Any]:
    """One sample: its numbers as text (JSON has no NaN), and where its tensors are not finite."""
    numbers = {name: str(value[place].item()) for name, value in tensors.items() if value.ndim == 1}
    places = {
        name: (~torch.isfinite(value[place])).nonzero()[:, 0].tolist()
        for name, value in tensors.items()
        if value.ndim == 2 and value.is_floating_point()
    }
    return {
        "row": int(row),
        **numbers,
        "not_finite_at": {name: found for name, found in places.items() if found},
        "text": None if texts is None else texts[int(row)],
    }
