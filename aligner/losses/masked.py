"""Reductions over tokens that count, and aggregation of token losses into one loss.

A mask is 1 (or True) if an element counts. Masked elements may be any value, NaN included, because
they are replaced, not multiplied by zero.

The loss of a batch is one of the following:

==================  ================================================================================
``token_mean``      Σ over tokens / valid tokens of the global batch (DAPO, Yu et al., 2025)
``sequence_mean``   Σ over sequences of (mean over their tokens) / valid sequences (GRPO, Shao et
                    al., 2024, and GSPO)
``fixed_length``    Σ over tokens / (valid sequences · longest response allowed) (Dr. GRPO, Liu et
                    al., 2025)
==================  ================================================================================

A sequence counts if its ``sample_mask`` is 1. A sequence without a generated token must have
``sample_mask`` 0. docs/formulas.md describes the choices of other libraries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from aligner.config.parse import check_fields
from aligner.types import Denominators


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum ``values`` [...] where ``mask`` [...] is 1, over ``dim`` (default: all dimensions)."""
    assert values.shape == mask.shape, (values.shape, mask.shape)
    masked = torch.where(mask.bool(), values, 0)
    return masked.sum() if dim is None else masked.sum(dim)


def masked_whiten(values: Tensor, mask: Tensor, *, over: Tensor | None = None) -> Tensor:
    """Compute ``(values - mean) * rsqrt(variance + 1e-8)``, 0 at masked positions.

    ``values``: float [...]. ``mask``: [...]. Mean and unbiased variance (verl, TRL) are over all
    unmasked elements, or over elements with ``over`` [...] equal to 1, in float64 and in two
    passes. The variance of one element is 0.
    """
    counted = mask if over is None else over
    count = counted.bool().sum().double()
    mean = _sum64(values, counted) / count.clamp(min=1)
    variance = _sum64(_less(values, mean).square(), counted) / (count - 1).clamp(min=1)
    scale = torch.rsqrt(variance + 1e-8)
    return torch.where(mask.bool(), _less(values, mean) * scale.to(values.dtype), 0)


def _less(values: Tensor, mean: Tensor) -> Tensor:
    """Compute ``values - mean`` in the dtype of ``values``, as exact as with the float64 ``mean``.

    A mean rounded to that dtype would hide small deviations of large values, so it is subtracted in
    two parts.
    """
    rounded = mean.to(values.dtype)
    return values - rounded - (mean - rounded).to(values.dtype)


def _sum64(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0).sum(dtype=torch.float64)


@dataclass(frozen=True)
class CheckedLoss:
    """Base of losses of single rows without entropy, whose options have the types of the fields."""

    needs_entropy: ClassVar[bool] = False
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)


Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


@dataclass(frozen=True)
class BatchAverage:
    """Average over the global batch. A call returns what one micro-batch adds to the average.

    ``mask``: bool [B, S], True if the token was generated and its sample counts.
    ``max_response_length``: limit of a response in tokens. Only ``fixed_length`` needs it.
    """

    mask: Tensor
    denominators: Denominators
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the summand of float ``values`` [B, S]. Masked positions may be any value."""
        if self.aggregation == "token_mean":
            return masked_sum(values, self.mask) / self.denominators.valid_tokens
        if self.aggregation == "sequence_mean":
            return row_means(values, self.mask).sum() / self.denominators.valid_seqs
        assert self.max_response_length is not None
        per_token = masked_sum(values, self.mask) / self.denominators.valid_seqs
        return per_token / self.max_response_length


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return float [B], the mean over each row's unmasked positions of [B, S], 0 if none."""
    return masked_sum(values, mask, dim=1) / mask.sum(1).clamp(min=1)


def counted_tokens(batch: Mapping[str, Tensor], *per_token: Tensor) -> Tensor:
    """Return bool [B, S], True if the token was generated and its sample is not masked.

    ``batch`` contains ``token_mask`` [B, S] and ``sample_mask`` [B]. ``per_token``: tensors of the
    mask's shape.
    """
    token_mask, sample_mask = batch["token_mask"], batch["sample_mask"]
    shapes = [token_mask.shape, *(tensor.shape for tensor in per_token)]
    assert token_mask.ndim == 2, shapes
    assert shapes.count(token_mask.shape) == len(shapes), shapes
    assert sample_mask.shape == token_mask.shape[:1], (sample_mask.shape, token_mask.shape)
    return token_mask.bool() & sample_mask.bool().unsqueeze(1)
