"""Collectives: of tensors and metrics, of small Python objects, and ones that have gradients.

The last gather and scatter along the first dimension; their gradients are the exact adjoints.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.device import accelerator


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


T = TypeVar("T")


def this_rank() -> int:
    """This process's rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_zero() -> bool:
    """Return whether this process is the one that writes files and prints."""
    return this_rank() == 0


def from_rank_zero(value: T) -> T:
    """Rank 0's ``value`` on every rank; a small picklable object."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on at least one rank."""
    return any(gather_objects(flag))


def on_rank_zero(action: Callable[[], T]) -> T:
    """Return on every rank the result of ``action`` on rank 0; its error is raised everywhere.

    For work with side effects, or that must not be done twice. The result must be picklable.
    """
    own: tuple[T | None, Exception | None] = (None, None)
    if is_rank_zero():
        try:
            own = (action(), None)
        except Exception as error:
            own = (None, error)
    result, failure = from_rank_zero(own)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def gather_objects(mine: T) -> list[T]:
    """``mine`` of every rank, in order of ranks; small picklable objects."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def gather_first(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Float [n, ...] of every rank one after the other: [ranks * n, ...].

    Differentiable: the gradients of all ranks are summed, and each takes its own part.
    """
    if group is None or dist.get_world_size(group) == 1:
        return local
    return _GatherFirst.apply(local, group)


def reduce_scatter_first(whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum float [ranks * n, ...] over the ranks and keep this rank's [n, ...]; no gradient."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return whole
    local = whole.new_empty(whole.shape[0] // ranks, *whole.shape[1:])
    dist.reduce_scatter(local, list(whole.contiguous().chunk(ranks)), group=group)
    return local


class _GatherFirst(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = local.new_empty(local.shape[0] * dist.get_world_size(group), *local.shape[1:])
        dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_first(grad_outputs[0], ctx.group), None


class SumGradient(torch.autograd.Function):
    """Identity on a tensor that every rank holds; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, replicated: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the tensor itself, float [...], the same on every rank of ``group``."""
        ctx.group = group
        return replicated.view_as(replicated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """All-reduce the gradient, float [...]; none for the group."""
        total = grad_outputs[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
