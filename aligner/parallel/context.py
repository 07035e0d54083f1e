"""Communication of context parallelism, and the tokens of a sequence on each rank.

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
    """Return the position in its sequence of the ``offset``-th token on ``rank``.

    ``chunk``: tokens per chunk of that sequence. Arguments broadcast. int64, numpy or torch.
    """
    in_second = (offset >= chunk) * 1
    return offset + (rank + in_second * (2 * size - 2 - 2 * rank)) * chunk


def holder(position: Positions, chunk: Positions, size: int) -> tuple[Positions, Positions]:
    """Return a position's rank and offset on that rank, as the inverse of `local_position`."""
    index = position // chunk
    in_second = index >= size
    rank = index + in_second * (2 * size - 1 - 2 * index)
    return rank, position - index * chunk + in_second * chunk


class SumOverRanks(torch.autograd.Function):
    """Sum of a partial tensor over the ranks. All ranks then compute the same from the sum.

    In backward each rank uses the gradient of its copy unchanged.
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
