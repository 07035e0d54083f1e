"""Running sums whose last bits repeat, on a GPU too."""

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDEST = 2048  # columns that one product takes; wider rows are cut into blocks
_BLOCK = 512


def running_sum(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of float [n, m] up to and including each column, in ``dtype``, by default its own.

    `torch.cumsum`, except on a GPU where operations that repeat were chosen: there PyTorch refuses
    it, and products with triangles of ones take its place.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_products(values).to(dtype or values.dtype)
    return values.cumsum(dim=1, dtype=dtype)


def sum_by_products(values: Tensor) -> Tensor:
    """`running_sum` as matrix products, float64 [n, m].

    A row of at most 2,048 columns is one product: its sums never fall, and stay equal where a zero
    is added.
    """
    rows, columns = values.shape
    width = columns if columns <= _WIDEST else _BLOCK
    blocks = F.pad(values.double(), (0, -columns % width)).view(rows, -1, width)
    ones = torch.ones(width, width, dtype=blocks.dtype, device=blocks.device)
    sums = blocks @ ones.triu()
    if blocks.shape[1] > 1:
        count = blocks.shape[1]
        sums = sums + (sums[:, :, -1] @ ones.new_ones(count, count).triu(1))[:, :, None]
    return sums.flatten(1)[:, :columns]
