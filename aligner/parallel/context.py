"""Context parallelism: which rank has which tokens of a sequence, and a sum over ranks.

A sequence is cut into ``2 * size`` chunks. Rank r gets chunks r and ``2 * size - 1 - r``, so that
every rank computes the same amount of causal attention.
"""

from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
Positions = TypeVar("Positions", IntArray, Tensor)


def local_position(offset: Positions, chunk: Positions, rank: int, size: int) -> Positions:
    """Return the position in the full sequence of the token at ``offset`` on ``rank``.

    ``chunk``: number of tokens per chunk. ``size``: number of ranks, each of which has two chunks.
    ``offset`` and ``chunk`` are int64 arrays or tensors [...] that broadcast.
    """
    in_second = (offset >= chunk) * 1
    return offset + (rank + in_second * (2 * size - 2 - 2 * rank)) * chunk


def holder(position: Positions, chunk: Positions, size: int) -> tuple[Positions, Positions]:
    """Return (rank, offset there) of the token at ``position``. Inverse of `local_position`."""
    index = position // chunk
    in_second = index >= size
    rank = index + in_second * (2 * size - 1 - 2 * index)
    return rank, position - index * chunk + in_second * chunk


class SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over ranks, for a loss that every rank computes from the sum.

    Backward returns the gradient of the sum unchanged. The ranks do not communicate.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum float ``partial`` [...] over ``group``."""
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, float [...], unchanged, and None for the group."""
        return gradients[0], None
