"""Collectives of tensors, metrics and small Python objects, and differentiable collectives."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.device import accelerator
from aligner.types import Denominators

T = TypeVar("T")


def combine_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine scalars by key: max for keys ending in ``_max``, min for ``_min``, else sum."""
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
    """Combine the metrics of all ranks in float64, as `combine_metrics`. Keys must be equal."""
    reduced: dict[str, float] = {}
    rules = ((dist.ReduceOp.MAX, "_max"), (dist.ReduceOp.MIN, "_min"), (dist.ReduceOp.SUM, ""))
    remaining = set(metrics)
    for operation, suffix in rules:
        keys = sorted(key for key in remaining if key.endswith(suffix))
        remaining -= set(keys)
        if not keys:
            continue
        stacked = torch.stack([metrics[key].detach().double() for key in keys])
        dist.all_reduce(stacked, operation, group=group)
        reduced.update(zip(keys, stacked.tolist(), strict=True))
    return reduced


def count_denominators(
    batch: Mapping[str, Tensor], dp_group: dist.ProcessGroup
) -> tuple[Denominators, Tensor]:
    """Count a global batch's valid tokens and sequences, the denominators of its losses.

    ``batch``: this rank's rows, with ``token_mask`` [B, S] and ``sample_mask`` [B]. Returns (counts
    over all ranks, number of this rank's valid tokens as a float64 scalar).
    """
    # float64, so that the counts are exact for any layout.
    mask = batch["token_mask"].double() * batch["sample_mask"].double()[:, None]
    own_tokens = mask.sum()
    counts = torch.stack([own_tokens, batch["sample_mask"].double().sum()])
    dist.all_reduce(counts, group=dp_group)
    tokens, seqs = counts.clamp(min=1.0).float()
    return Denominators(valid_tokens=tokens, valid_seqs=seqs), own_tokens


def reduce_result(
    parts: Iterable[Mapping[str, Tensor]], own_tokens: Tensor, dp_group: dist.ProcessGroup
) -> dict[str, float]:
    """Combine micro-batch metrics of all ranks. Add ``own_tokens`` (scalar) as ``valid_tokens``."""
    return reduce_metrics({**combine_metrics(parts), "valid_tokens": own_tokens}, dp_group)


def broadcast_floats(
    values: Mapping[str, float] | None, source: int, group: dist.ProcessGroup
) -> dict[str, float]:
    """Return on all ranks of ``group`` the ``values`` of the global rank ``source``."""
    box: list[Mapping[str, float] | None] = [values]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(box, src=source, group=group, device=accelerator.device())
    assert box[0] is not None
    return dict(box[0])


def this_rank() -> int:
    """Return the rank of this process, 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_zero() -> bool:
    """Return whether this process has rank 0, which writes files and prints."""
    return this_rank() == 0


def from_rank_zero(value: T) -> T:
    """Return rank 0's ``value`` on every rank. It must be small and picklable."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_rank_zero(action: Callable[[], T]) -> T:
    """Call ``action`` on rank 0. Return its picklable result, or raise its error, on every rank."""
    outcome: tuple[T | None, Exception | None] = (None, None)
    if is_rank_zero():
        try:
            outcome = (action(), None)
        except Exception as error:
            outcome = (None, error)
    result, failure = from_rank_zero(outcome)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the picklable ``value`` of each rank in ``group`` (default: all), in rank order."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_first(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate ``local``, float [n, ...], of all ranks to [ranks * n, ...].

    Backward sums the gradients over the ranks and returns this rank's part [n, ...].
    """
    if group is None or dist.get_world_size(group) == 1:
        return local
    return _GatherFirst.apply(local, group)


def reduce_scatter_first(gathered: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum float [ranks * n, ...] over the ranks and return this rank's [n, ...]. No gradient."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return gathered
    local = gathered.new_empty(gathered.shape[0] // ranks, *gathered.shape[1:])
    dist.reduce_scatter(local, list(gathered.contiguous().chunk(ranks)), group=group)
    return local


class _GatherFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty(local.shape[0] * dist.get_world_size(group), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_first(grad_outputs[0], ctx.group), None


class SumGradient(torch.autograd.Function):
    """Identity for a tensor that is equal on all ranks. Backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, replicated: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return ``replicated`` unchanged: float [...], equal on every rank of ``group``."""
        ctx.group = group
        return replicated.view_as(replicated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Return the sum over ranks of the gradient, float [...], and None for ``group``."""
        total = grad_outputs[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
