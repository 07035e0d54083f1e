"""Communication of context parallelism, and the tokens of a sequence that a rank holds.

A sequence is cut into ``2 * size`` chunks and rank r holds chunks r and ``2 * size - 1 - r``: under
a causal mask every rank then has the same amount of attention to compute.
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


class SumOverRanks(torch.autograd.Function):
    """Sum of a partial tensor over the ranks, which then compute the same from it.

    The gradient is therefore every rank's own and passes unchanged.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum float ``partial`` [...] over ``group``."""
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient, float [...]; none for the group."""
        return gradients[0], None
