"""Corrections for rollouts that were not sampled by the policy that is trained on them.

The sampler's log-probs differ from the trainer's of the same tokens where its engine rounds
otherwise, where it samples in a way that the trainer does not know, and where its weights are
older. With the log-ratio ``d = log p_trainer - log p_sampler`` of a generated token:

=====================  ============================================================================
weights                ``exp(d)`` of a token, or ``exp(Σ d)`` of a response: its tokens share it
truncated              a weight outside the bounds is moved to the bound (truncated importance
                       sampling, Yao et al., 2025)
masked                 a weight outside the bounds is 0 (IcePop, 2025; of a response TRL's
                       sequence mask)
geometric rejection    a response whose ``exp(mean d)`` is outside bounds has weight 0
                       (Liu, Li et al., 2025)
second moment          of a global batch, the tokens of the largest ``d²`` have weight 0, as few as
                       bring the mean of the others below a limit (M2PO, Zheng et al., 2025)
=====================  ============================================================================

Weights multiply the surrogate of the policy loss, without gradient. A token of weight 0 stays in
the loss's denominator (as in IcePop and TRL; verl, and AReaL with M2PO, take rejected tokens out of
it) and in its KL and entropy terms.

Log-ratios are clamped to ±20 before ``exp``, as verl does: no weight is infinite.

Shape legend: ``B`` sequences, ``S`` padded length; masks are True where a token was generated and
its sample counts. Masked positions may hold anything.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aligner.config import CorrectionConfig
from aligner.losses.masked import BatchAverage, row_means

Bounds = tuple[float, float]

LARGEST_LOG_RATIO = 20.0


def importance_weights(
    log_ratio: Tensor, mask: Tensor, level: Literal["token", "sequence"]
) -> Tensor:
    """Weights before any bound, float [B, S].

    ``log_ratio`` float [B, S], ``mask`` bool [B, S].
    ``token``: ``exp(d)``, 1 where masked. ``sequence``: the product over a response's tokens, the
    same all along its row.
    """
    log_ratio = torch.where(mask, log_ratio, 0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return _bounded_exp(log_ratio)


def is_outside(values: Tensor, bounds: Bounds) -> Tensor:
    """Bool, the shape of float ``values`` [...]: below the first bound or above the second."""
    low, high = bounds
    return (values < low) | (values > high)


def within_bounds(weights: Tensor, bounds: Bounds, outside: Literal["truncate", "mask"]) -> Tensor:
    """``weights``, float [...], with those outside ``bounds`` moved to the bound, or set to 0."""
    if outside == "truncate":
        return weights.clamp(*bounds)
    return torch.where(is_outside(weights, bounds), 0, weights)


def geometric_rejection(log_ratio: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """Bool [B], True where ``exp(mean d)`` of the response is outside ``bounds``.

    ``log_ratio`` float [B, S], ``mask`` bool [B, S]. A response without a token is not rejected.
    verl has this as ``seq_mean_k1``, with bounds of the reciprocal.
    """
    mean = row_means(torch.where(mask, log_ratio, 0), mask)
    return is_outside(_bounded_exp(mean), bounds) & mask.any(1)


def second_moment_mask(log_ratio: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Bool [B, S], True at the tokens that M2PO leaves (arXiv 2510.01161).

    ``log_ratio`` float [B, S] and ``mask`` bool [B, S] of a whole global batch: the tokens left are
    all but the fewest of the largest ``d²`` whose absence brings the mean of ``d²`` over the others
    to ``limit`` or below. Of equals the earlier goes first. False where masked.
    """
    flat = mask.flatten().nonzero().squeeze(1)
    squares = log_ratio.flatten()[flat].double().square()
    ordered, order = squares.sort(descending=True, stable=True)
    # Means of what is left when the first n are gone. Summed from the small end: in the other
    # direction one large square would swallow the digits of the small ones.
    counts = torch.arange(len(ordered), 0, -1, device=ordered.device)
    means = ordered.flip(0).cumsum(0).flip(0) / counts
    gone = int((means > limit).sum())  # means fall with every largest that goes
    left = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    left[flat[order[gone:]]] = True
    return left.view_as(mask)


def second_moment_masks(batch: Mapping[str, Tensor], limit: float, rows: int) -> Tensor:
    """`second_moment_mask` of each ``rows`` rows of a rollout, those of one update.

    ``batch`` has ``prev_logprobs``, ``generation_logprobs`` and ``token_mask`` float [B, S] and
    ``sample_mask`` float [B]. Returns the column ``second_moment_mask``, float32 [B, S].
    """
    mask = batch["token_mask"].bool() & batch["sample_mask"].bool()[:, None]
    log_ratio = batch["prev_logprobs"] - batch["generation_logprobs"]
    parts = zip(log_ratio.split(rows), mask.split(rows), strict=True)
    return torch.cat([second_moment_mask(*part, limit) for part in parts]).float()


class Corrected(NamedTuple):
    """``weights`` float [B, S], no gradient, None: 1 everywhere; ``metrics`` shares, scalars."""

    weights: Tensor | None
    metrics: dict[str, Tensor]


def correct(
    correction: CorrectionConfig,
    log_ratio: Tensor,
    average: BatchAverage,
    left: Tensor | None = None,
) -> Corrected:
    """Weights of a micro-batch's tokens, and what there is to see of them.

    Args:
        correction: the section ``model.ppo.correction``.
        log_ratio: float [B, S], the trainer's log-prob less the sampler's; no gradient.
        average: mean over the counting tokens of the global batch, with this micro-batch's mask.
        left: the column ``second_moment_mask`` [B, S], where ``correction.second_moment`` is given.

    Metrics are shares of means over tokens: ``importance_weight`` and its
    ``importance_weight_square`` as applied, ``weights_outside`` of those outside the bounds,
    ``tokens_rejected`` in rejected responses, ``tokens_over_second_moment``.
    """
    mask = average.mask
    log_ratio = torch.where(mask, log_ratio, 0)
    weights: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    if correction.weights != "none":
        weights = importance_weights(log_ratio, mask, correction.weights)
        metrics["weights_outside"] = average(
            is_outside(weights, correction.bounds).to(log_ratio.dtype)
        )
        weights = within_bounds(weights, correction.bounds, correction.outside)
    if correction.geometric_bounds is not None:
        rejected = geometric_rejection(log_ratio, mask, correction.geometric_bounds)
        rejected = rejected[:, None].expand_as(mask)
        metrics["tokens_rejected"] = average(rejected.to(log_ratio.dtype))
        weights = _without(rejected, weights, log_ratio)
    if correction.second_moment is not None:
        assert left is not None, "the column second_moment_mask is missing"
        metrics["tokens_over_second_moment"] = average((~left.bool()).to(log_ratio.dtype))
        weights = _without(~left.bool(), weights, log_ratio)
    if weights is not None:
        metrics["importance_weight"] = average(weights)
        metrics["importance_weight_square"] = average(weights.square())
    return Corrected(weights, metrics)


def gap_metrics(log_ratio: Tensor, average: BatchAverage) -> dict[str, Tensor]:
    """Measures of the distance of the sampler from the trainer, shares of means over tokens.

    ``log_ratio`` float [B, S] as in `correct`. With ``r = exp(d)``, all from the sampler's tokens:

    - ``logprob_gap_mean``: ``|d|``. ``logprob_gap_max``: the largest, 0 without a token.
    - ``kl_k1``, ``kl_k3``: KL(sampler ‖ trainer), ``-d`` and ``r - 1 - d`` (verl's kl, k3_kl).
    - ``reverse_kl_k1``, ``reverse_kl_k3``: KL(trainer ‖ sampler), ``r·d`` and ``r·d - r + 1``.
    - ``token_mult_prob_error``: ``exp|d|``, by which factor a probability is off (NeMo-RL).
    - ``tokens_above_ln2``: share of tokens with ``|d| > ln 2``.
    """
    d = torch.where(average.mask, log_ratio, 0)
    gap = d.abs()
    near = d.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    r, excess = near.exp(), torch.expm1(near)  # expm1: r - 1 has no digits left where d is small
    return {
        "logprob_gap_mean": average(gap),
        "logprob_gap_max": gap.amax() if gap.numel() else gap.new_zeros(()),
        "kl_k1": average(-d),
        "kl_k3": average(excess - near),
        "reverse_kl_k1": average(r * near),
        "reverse_kl_k3": average(r * near - excess),
        "token_mult_prob_error": average(near.abs().exp()),
        "tokens_above_ln2": average((gap > math.log(2)).to(d.dtype)),
    }


def effective_sample_size(mean: float, mean_square: float) -> float:
    """Effective sample size over the number of samples: ``(Σ w)² / (n · Σ w²)``.

    Of the means of weights and of their squares, over one update. 1: all weigh the same. NaN where
    every weight is 0.
    """
    return mean**2 / mean_square if mean_square else math.nan


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _without(gone: Tensor, weights: Tensor | None, like: Tensor) -> Tensor:
    """``weights`` (None: 1) with 0 where ``gone``."""
    return torch.where(gone, 0, torch.ones_like(like) if weights is None else weights)
