"""Files that describe an update with a NaN or infinite loss or gradient."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.durable import storing, unused_path, write_json
from aligner.checkpoint.run_state.tree import normalise, write_tree
from aligner.errors import current_step


def offending_rows(batch: Mapping[str, Any]) -> Tensor:
    """Return bool [B], True for the rows of ``batch`` that contain NaN or infinity.

    If no row does, the model computed the invalid value, and all rows are True.
    """
    rows = batch["input_ids"].shape[0]
    offending = torch.zeros(rows, dtype=torch.bool)
    for value in batch.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:1] == (rows,):
            offending |= ~torch.isfinite(value.detach().cpu()).reshape(rows, -1).all(dim=1)
    return offending if offending.any() else torch.ones(rows, dtype=torch.bool)


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
    """Write scalars and samples of an update whose loss or gradient is not finite.

    ``<folder>/nonfinite/step_000012_policy_update_000_rank_00000.json`` contains the scalars and,
    for each row in `offending_rows`, its index, its per-sample values and its text. The ``.pt``
    file of the same name contains all tensors of these rows, for ``torch.load(...,
    weights_only=True)``. Each rank writes its own files. Returns the path of the JSON file.

    ``role``: ``policy`` or ``critic``. ``batch``: columns of the mini-batch, such as ``input_ids``
    int64 [B, S]. ``texts``: text of prompt and response of each row. ``update``: index of the
    mini-batch in this pass over the rollout, from 0. ``updates``: number of optimizer updates of
    this model so far in the run.
    """
    # Tensors of the offending rows.
    rows = offending_rows(batch)
    tensors = {
        name: value.detach().cpu()[rows]
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[:1] == rows.shape
    }
    report = {
        "step": current_step(),
        "role": role,
        "update": update,
        "updates_made": updates,
        "rank": rank,
        "not_finite": [name for name, value in scalars.items() if not math.isfinite(float(value))],
        "scalars": {name: repr(float(value)) for name, value in scalars.items()},
        "samples": [
            {**_sample(index, tensors), "row": row, "text": None if texts is None else texts[row]}
            for index, row in enumerate(rows.nonzero()[:, 0].tolist())
        ],
    }
    name = f"step_{current_step():06d}_{role}_update_{update:03d}_rank_{rank:05d}"
    # A second pass must not overwrite the evidence of the first.
    path = unused_path(folder / "nonfinite" / f"{name}.json")
    with storing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    # The tensors first, so that a report always has its tensors.
    write_tree(path.with_suffix(".pt"), normalise(tensors, "batch"))
    write_json(path, report)
    return path


def _sample(index: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return per-sample values, and positions of NaN or infinity, in row ``index`` of tensors."""
    values = {name: str(value[index].item()) for name, value in tensors.items() if value.ndim == 1}
    positions = {
        name: (~torch.isfinite(value[index])).nonzero()[:, 0].tolist()
        for name, value in tensors.items()
        if value.ndim == 2 and value.is_floating_point()
    }
    return {**values, "not_finite_at": {name: row for name, row in positions.items() if row}}
