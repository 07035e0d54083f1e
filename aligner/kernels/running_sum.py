"""Running sums that are deterministic, also on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDEST = 2048  # columns of one product. Wider rows are cut into blocks
_BLOCK = 512


def running_sum(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum float [n, m] up to and including each column, in ``dtype``, by default the input's.

    The result of `torch.cumsum`. PyTorch has no deterministic kernel for it on GPUs: if
    deterministic operations were requested there, products with triangles of ones replace it.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_products(values).to(dtype or values.dtype)
    return values.cumsum(dim=1, dtype=dtype)


def sum_by_products(values: Tensor) -> Tensor:
    """Compute `running_sum` as matrix products, float64 [n, m].

    The sums of a row of at most 2,048 columns never fall, and adding a zero does not change them,
    because such a row is one product.
    """
    rows, columns = values.shape
    width = columns if columns <= _WIDEST else _BLOCK
    blocks = F.pad(values.double(), (0, -columns % width)).view(rows, -1, width)
    ones = torch.ones(width, width, dtype=blocks.dtype, device=blocks.device)
    sums = blocks @ ones.triu()
    if blocks.shape[1] > 1:
        # Add the total of all earlier blocks.
        count = blocks.shape[1]
        sums = sums + (sums[:, :, -1] @ ones.new_ones(count, count).triu(1))[:, :, None]
    return sums.flatten(1)[:, :columns]
