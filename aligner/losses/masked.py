"""Reductions over the tokens that count, and aggregation of their losses into one.

A mask is 1 (or True) where an element counts. Masked-out elements may hold anything, NaN
included: they are replaced, not multiplied by zero.

The loss of a batch is one of:

==================  ================================================================================
``token_mean``      Σ over tokens / valid tokens of the global batch. Every token weighs the same
                    (DAPO, Yu et al., 2025; the default of verl and NeMo-RL)
``sequence_mean``   Σ over sequences of (mean over their tokens) / valid sequences. Every sequence
                    weighs the same, tokens of long ones less (GRPO, Shao et al., 2024; GSPO)
``fixed_length``    Σ over tokens / (valid sequences · longest response allowed). Every token weighs
                    the same in every batch (Dr. GRPO, Liu et al., 2025; verl divides by the padded
                    width by default, TRL by the length allowed, as here)
==================  ================================================================================

A sequence counts when its ``sample_mask`` is 1 (NeMo-RL; verl and OpenRLHF count those with a
token, TRL all). One without a generated token is to have ``sample_mask`` 0.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError
from aligner.types import Denominators


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of ``values`` where ``mask`` is 1, over ``dim`` (default: all dimensions).

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
    *,
    over: Tensor | None = None,
) -> Tensor:
    """``(values - mean) * rsqrt(variance + eps)`` where ``mask`` is 1, and 0 elsewhere.

    ``values``: float [...]; ``mask``: [...], of the same shape. Mean and unbiased variance are
    taken over all unmasked elements of all ranks of ``group`` (the convention of verl and TRL;
    OpenRLHF and NeMo-Aligner use the population variance), or those where ``over`` [...] is 1.
    """
    mean, variance = masked_moments(values, mask if over is None else over, group)
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


Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


@dataclass(frozen=True)
class BatchAverage:
    """This micro-batch's share of an average over the global batch.

    ``mask``: bool [B, S], True where the token was generated and its sample counts.
    ``max_response_length``: most tokens a response may have; only ``fixed_length`` needs it.
    """

    mask: Tensor
    denominators: Denominators
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Scalar share for float [B, S]; masked positions may hold anything."""
        if self.aggregation == "token_mean":
            return masked_mean(values, self.mask, self.denominators.valid_tokens)
        if self.aggregation == "sequence_mean":
            return row_means(values, self.mask).sum() / self.denominators.valid_seqs
        assert self.max_response_length is not None
        per_token = masked_mean(values, self.mask, self.denominators.valid_seqs)
        return per_token / self.max_response_length


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row of float [B, S] over its unmasked positions, float [B]; 0 without any."""
    return masked_sum(values, mask, dim=1) / mask.sum(1).clamp(min=1)


def counted_tokens(batch: Mapping[str, Tensor], *of_tokens: Tensor) -> Tensor:
    """Bool [B, S]: the token was generated and its sample counts.

    ``batch`` has ``token_mask`` [B, S] and ``sample_mask`` [B]. ``of_tokens``: float [B, S] each,
    the tensors that the mask is for.
    """
    token_mask, sample_mask = batch["token_mask"], batch["sample_mask"]
    shapes = [token_mask.shape, *(each.shape for each in of_tokens)]
    assert token_mask.ndim == 2, shapes
    assert shapes.count(token_mask.shape) == len(shapes), shapes
    assert sample_mask.shape == token_mask.shape[:1], (sample_mask.shape, token_mask.shape)
    return token_mask.bool() & sample_mask.bool().unsqueeze(1)


def check_choice(key: str, value: str, known: Collection[str]) -> None:
    """Refuse a value of ``key`` that is not one of the ``known`` names."""
    if value not in known:
        raise ConfigError(f"{key}={value!r} is unknown; use one of {', '.join(known)}")


def check_aggregation(aggregation: str, max_response_length: int | None) -> None:
    """Refuse an unknown aggregation, and a length that is missing or has no effect."""
    check_choice("aggregation", aggregation, get_args(Aggregation))
    if aggregation == "fixed_length":
        if max_response_length is None or max_response_length < 1:
            raise ConfigError(
                f"aggregation=fixed_length needs max_response_length of at least 1, got "
                f"{max_response_length}; give the most tokens a response may have"
            )
    elif max_response_length is not None:
        raise ConfigError(
            f"max_response_length={max_response_length} says nothing with aggregation="
            f"{aggregation}; leave it out, or use aggregation=fixed_length"
        )
