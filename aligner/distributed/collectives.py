"""Reductions of tensors and metrics over process groups."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.distributed import accelerator


def combine_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine micro-batches: ``_max`` and ``_min`` keys by extremum, everything else by sum.

    Metrics are scalars of any number type, and so are those returned.
    """
    total: dict[str, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            if key not in total:
                total[key] = value.clone()
            elif key.endswith("_max"):
                total[key] = torch.maximum(total[key], value)
            elif key.endswith("_min"):
                total[key] = torch.minimum(total[key], value)
            else:
                total[key] = total[key] + value
    return total


def reduce_metrics(metrics: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, float]:
    """Combine ranks as `combine_metrics` combines micro-batches, in float64.

    ``metrics``: scalars; every rank of ``group`` must hold the same keys.
    """
    reduced: dict[str, float] = {}
    rules = ((dist.ReduceOp.MAX, "_max"), (dist.ReduceOp.MIN, "_min"), (dist.ReduceOp.SUM, ""))
    left = set(metrics)
    for operation, suffix in rules:
        keys = sorted(key for key in left if key.endswith(suffix))
        left -= set(keys)
        if not keys:
            continue
        stacked = torch.stack([metrics[key].detach().double() for key in keys])
        dist.all_reduce(stacked, operation, group=group)
        reduced.update(zip(keys, stacked.tolist(), strict=True))
    return reduced


def broadcast_floats(
    values: Mapping[str, float] | None, source: int, group: dist.ProcessGroup
) -> dict[str, float]:
    """Send a small dictionary from global rank ``source`` to all of ``group``."""
    if dist.get_world_size(group) == 1:
        assert values is not None
        return dict(values)
    box: list[Mapping[str, float] | None] = [values]
    dist.broadcast_object_list(box, src=source, group=group, device=accelerator.device())
    assert box[0] is not None
    return dict(box[0])
