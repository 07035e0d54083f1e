"""What context parallelism communicates, and which tokens of a sequence a rank holds.

A sequence is cut into ``2 * size`` chunks and rank r holds chunks r and ``2 * size - 1 - r``: under
a causal mask every rank then has the same amount of attention to compute.
"""

from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

IntArray = NDArray[np.int64]
Positions = TypeVar("Positions", IntArray, Tensor)


def local_position(offset: Positions, chunk: Positions, rank: int, size: int) -> Positions:
    """Position in its sequence of the ``offset``-th token that ``rank`` holds of it.

    ``chunk``: tokens of a chunk of that sequence. Both broadcast; int64, numpy or torch.
    """
    late = (offset >= chunk) * 1
    return offset + (rank + late * (2 * size - 2 - 2 * rank)) * chunk


def holder(position: Positions, chunk: Positions, size: int) -> tuple[Positions, Positions]:
    """Inverse of `local_position`: the rank that holds a position, and its offset there."""
    number = position // chunk
    late = number >= size
    rank = number + late * (2 * size - 1 - 2 * number)
    return rank, position - number * chunk + late * chunk


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[R, ...]`` of every rank one after the other, ``[size * R, ...]``.

    Every rank uses the result differently, so gradients are summed over the ranks on the way back.
    """
    return _GatherRows.apply(rows, group)


def sum_over_ranks(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of ``partial`` over the ranks, each of which goes on to compute the same with it.

    The gradient is therefore every rank's own and passes unchanged.
    """
    return _SumOverRanks.apply(partial, group)


class _GatherRows(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = rows.new_empty(rows.shape[0] * dist.get_world_size(group), *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous()
        size = dist.get_world_size(ctx.group)
        local = whole.new_empty(whole.shape[0] // size, *whole.shape[1:])
        dist.reduce_scatter_tensor(local, whole, group=ctx.group)
        return local, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
