"""Sums and means over unmasked tokens, and aggregation of token losses into one loss.

A mask is 1 or True for elements to include. Excluded elements may have any value, also NaN, because
they are replaced by 0, not multiplied by 0.

The loss of a batch is one of the following:

==================  ================================================================================
``token_mean``      Σ over tokens / valid tokens of the global batch (DAPO, Yu et al., 2025)
``sequence_mean``   Σ over sequences of (mean over their tokens) / valid sequences (GRPO, Shao et
                    al., 2024, and GSPO)
``fixed_length``    Σ over tokens / (valid sequences · maximum response length) (Dr. GRPO, Liu et
                    al., 2025)
==================  ================================================================================

A sequence is valid if its ``sample_mask`` is 1. A sequence without a generated token must have
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
    """Compute ``(values - mean) * rsqrt(variance + 1e-8)``, 0 where ``mask`` is 0.

    Mean and unbiased variance (as in verl and TRL) are computed in float64 over the elements where
    ``over`` is 1, by default where ``mask`` is 1. The variance of one element is 0. ``values``:
    float [...]. ``mask``, ``over``: [...], the shape of ``values``.
    """
    over = (mask if over is None else over).bool()
    count = over.sum().double()
    mean = torch.where(over, values, 0).sum(dtype=torch.float64) / count.clamp(min=1)
    squares = torch.where(over, _subtract(values, mean).square(), 0).sum(dtype=torch.float64)
    scale = torch.rsqrt(squares / (count - 1).clamp(min=1) + 1e-8)
    return torch.where(mask.bool(), _subtract(values, mean) * scale.to(values.dtype), 0)


def _subtract(values: Tensor, mean: Tensor) -> Tensor:
    """Compute ``values - mean`` in the dtype of ``values``, where ``mean`` is float64.

    The mean's rounding error is subtracted separately. It matters if all values are large and near
    each other.
    """
    rounded = mean.to(values.dtype)
    return values - rounded - (mean - rounded).to(values.dtype)


@dataclass(frozen=True)
class CheckedLoss:
    """Base class of losses that check the types of their options and read no entropy."""

    needs_entropy: ClassVar[bool] = False
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)


Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


@dataclass(frozen=True)
class BatchAverage:
    """Average over the tokens of the global batch, as a sum of contributions of micro-batches.

    ``mask``: bool [B, S], True for generated tokens of samples that are not excluded.
    ``max_response_length``: maximum number of tokens in a response, for ``fixed_length``.
    """

    mask: Tensor
    denominators: Denominators
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return what ``values``, float [B, S], contribute to the average, a scalar."""
        if self.aggregation == "token_mean":
            return masked_sum(values, self.mask) / self.denominators.valid_tokens
        if self.aggregation == "sequence_mean":
            return row_means(values, self.mask).sum() / self.denominators.valid_seqs
        assert self.max_response_length is not None
        per_token = masked_sum(values, self.mask) / self.denominators.valid_seqs
        return per_token / self.max_response_length


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return float [B], the mean of each row of [B, S] over unmasked positions, 0 if all masked."""
    return masked_sum(values, mask, dim=1) / mask.sum(1).clamp(min=1)


def counted_tokens(batch: Mapping[str, Tensor], *per_token: Tensor) -> Tensor:
    """Return bool [B, S], True for generated tokens of samples that are not excluded.

    ``batch`` contains ``token_mask`` [B, S] and ``sample_mask`` [B]. ``per_token``: tensors that
    are checked to have the shape [B, S].
    """
    token_mask, sample_mask = batch["token_mask"], batch["sample_mask"]
    shapes = [token_mask.shape, *(tensor.shape for tensor in per_token)]
    assert token_mask.ndim == 2, shapes
    assert shapes.count(token_mask.shape) == len(shapes), shapes
    assert sample_mask.shape == token_mask.shape[:1], (sample_mask.shape, token_mask.shape)
    return token_mask.bool() & sample_mask.bool().unsqueeze(1)
