"""Reductions over the tokens that count.

A mask is 1 (or True) where an element counts. Masked-out elements may hold anything, NaN
included: they are replaced, not multiplied by zero.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of ``values`` where ``mask`` is 1, over ``dim`` (default: all dimensions, giving a
    scalar).

    ``values``: [...], of any dtype; ``mask``: [...], of the same shape.
    """
    assert values.shape == mask.shape, (values.shape, mask.shape)
    kept = torch.where(mask.bool(), values, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(
    values: Tensor, mask: Tensor, denominator: Tensor | float, dim: int | None = None
) -> Tensor:
    """``sum(mask * values) / denominator``; ``values`` and ``mask`` as in `masked_sum`.

    The denominator, a scalar or of the shape of the sum, is named by the caller (usually a count
    over the whole global batch), because a mean over one micro-batch must not be averaged again.
    """
    return masked_sum(values, mask, dim) / denominator


def masked_moments(
    values: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over all unmasked elements of all ranks of ``group``.

    ``values``: float [...]; ``mask``: [...], of the same shape. Two passes, accumulated in float64.
    Without an element both are 0; a single one has variance 0. With ``group=None`` only this
    process's elements count. Returns two float64 scalars.
    """
    count = mask.bool().sum().double()
    first = _all_ranks(torch.stack([count, _sum64(values, mask)]), group)
    count, mean = first[0], first[1] / first[0].clamp(min=1)
    squares = _all_ranks(_sum64(_less(values, mean).square(), mask), group)
    return mean, squares / (count - 1).clamp(min=1)


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    group: dist.ProcessGroup | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """``(values - mean) * rsqrt(variance + eps)`` where ``mask`` is 1, and 0 elsewhere.

    ``values``: float [...]; ``mask``: [...], of the same shape. Mean and unbiased variance are
    taken over all unmasked elements of all ranks of ``group`` (the convention of verl and TRL;
    OpenRLHF and NeMo-Aligner use the population variance).
    """
    mean, variance = masked_moments(values, mask, group)
    scale = torch.rsqrt(variance + eps)
    return torch.where(mask.bool(), _less(values, mean) * scale.to(values.dtype), 0)


def _less(values: Tensor, mean: Tensor) -> Tensor:
    """``values - mean`` in the dtype of ``values``, as exact as with the float64 ``mean``.

    In two parts: a mean rounded once would be off by its own rounding error, which beside small
    deviations of large values is large.
    """
    rounded = mean.to(values.dtype)
    return values - rounded - (mean - rounded).to(values.dtype)


def _sum64(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0).sum(dtype=torch.float64)


def _all_ranks(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
