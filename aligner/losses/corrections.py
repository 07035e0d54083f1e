"""Corrections for rollouts that were sampled by another policy than the policy in training.

docs/corrections.md describes the corrections. ``d = log p_trainer - log p_sampler`` is the
log-ratio of a generated token, clamped to ±20 before ``exp``, so every weight is finite. Weights
have no gradient and multiply the surrogate of the policy loss. A token of weight 0 still counts in
the loss's denominator and in the KL and entropy terms. ``mask`` is True for generated tokens of
samples that are not excluded. Other positions may contain any value.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from aligner.config import CorrectionConfig
from aligner.losses.masked import BatchAverage, row_means

Bounds = tuple[float, float]

LARGEST_LOG_RATIO = 20.0


def importance_weights(
    log_ratio: Tensor, mask: Tensor, level: Literal["token", "sequence"]
) -> Tensor:
    """Compute importance weights, not yet bounded, float [B, S].

    ``log_ratio``: float [B, S], trainer's minus sampler's log-prob. ``mask``: bool [B, S], True for
    generated tokens. ``level="token"``: ``exp(log_ratio)``, 1 where the mask is False.
    ``"sequence"``: the product of these weights over the row, at every position.
    """
    log_ratio = torch.where(mask, log_ratio, 0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return _bounded_exp(log_ratio)


def is_outside(values: Tensor, bounds: Bounds) -> Tensor:
    """Return bool [...], True where float ``values`` [...] are below or above the bounds."""
    low, high = bounds
    return (values < low) | (values > high)


def within_bounds(weights: Tensor, bounds: Bounds, outside: Literal["truncate", "mask"]) -> Tensor:
    """Replace ``weights`` (float [...]) outside ``bounds``, by the nearest bound or by 0.

    ``outside="truncate"``: by the bound (Yao et al., 2025). ``"mask"``: by 0 (IcePop, 2025).
    """
    if outside == "truncate":
        return weights.clamp(*bounds)
    return torch.where(is_outside(weights, bounds), 0, weights)


def geometric_rejection(log_ratio: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """Return bool [B], True for rejected responses (Liu, Li et al., 2025).

    A response is rejected if ``exp`` of its mean ``log_ratio`` is outside ``bounds``.
    ``log_ratio``: float [B, S]. ``mask``: bool [B, S], True for the tokens of the response. A row
    without such a token is not rejected.
    """
    mean = row_means(torch.where(mask, log_ratio, 0), mask)
    return is_outside(_bounded_exp(mean), bounds) & mask.any(1)


def second_moment_mask(log_ratio: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Return bool [B, S], True for the tokens that M2PO trains on (Zheng et al., 2025).

    M2PO removes tokens, starting with the largest ``log_ratio²``, until the mean of ``log_ratio²``
    over the remaining tokens is at most ``limit``. Of tokens with equal values the earlier is
    removed first. ``log_ratio``: float [B, S], the whole global batch. ``mask``: bool [B, S], True
    for generated tokens. The result is False elsewhere.
    """
    flat = mask.flatten().nonzero().squeeze(1)
    squares = log_ratio.flatten()[flat].double().square()
    ordered, order = squares.sort(descending=True, stable=True)
    # means[n]: mean of the squares that remain after the removal of the n largest. Sums start at
    # the small end, because one large square would swallow the digits of small squares.
    counts = torch.arange(len(ordered), 0, -1, device=ordered.device)
    means = ordered.flip(0).cumsum(0).flip(0) / counts
    n_removed = int((means > limit).sum())  # means fall with every removal
    kept_tokens = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    kept_tokens[flat[order[n_removed:]]] = True
    return kept_tokens.view_as(mask)


def second_moment_masks(batch: Mapping[str, Tensor], limit: float, rows: int) -> Tensor:
    """Compute `second_moment_mask` for each optimizer update of a rollout, float32 [B, S].

    An update trains on ``rows`` adjacent rows. ``batch`` contains ``prev_logprobs``,
    ``generation_logprobs`` and ``token_mask``, float [B, S], and ``sample_mask``, float [B].
    """
    mask = batch["token_mask"].bool() & batch["sample_mask"].bool()[:, None]
    log_ratio = batch["prev_logprobs"] - batch["generation_logprobs"]
    parts = zip(log_ratio.split(rows), mask.split(rows), strict=True)
    return torch.cat([second_moment_mask(*part, limit) for part in parts]).float()


def correct(
    correction: CorrectionConfig,
    log_ratio: Tensor,
    average: BatchAverage,
    moment_mask: Tensor | None = None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Compute token weights for a micro-batch, float [B, S], and metrics.

    None in place of weights means that all weights are 1. ``log_ratio``: float [B, S], the
    trainer's log-prob minus the sampler's, without gradient. ``average``: averages over the
    unmasked tokens of the global batch. ``moment_mask``: [B, S], result of `second_moment_masks`,
    required if ``correction.second_moment`` is set.

    Metrics are means over tokens: ``importance_weight`` and its square
    ``importance_weight_square``, and the shares ``weights_outside`` (tokens with a weight outside
    the bounds), ``tokens_rejected`` (in rejected responses) and ``tokens_over_second_moment``.
    """
    mask = average.mask
    log_ratio = torch.where(mask, log_ratio, 0)
    weights: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    # Importance weights, truncated or masked at the bounds.
    if correction.weights != "none":
        weights = importance_weights(log_ratio, mask, correction.weights)
        metrics["weights_outside"] = average(
            is_outside(weights, correction.bounds).to(log_ratio.dtype)
        )
        weights = within_bounds(weights, correction.bounds, correction.outside)
    # Rejection of whole responses.
    if correction.geometric_bounds is not None:
        rejected = geometric_rejection(log_ratio, mask, correction.geometric_bounds)
        rejected = rejected[:, None].expand_as(mask)
        metrics["tokens_rejected"] = average(rejected.to(log_ratio.dtype))
        weights = _remove(rejected, weights, log_ratio)
    # Removal of tokens by the second moment.
    if correction.second_moment is not None:
        assert moment_mask is not None, "the column second_moment_mask is missing"
        is_over = ~moment_mask.bool()
        metrics["tokens_over_second_moment"] = average(is_over.to(log_ratio.dtype))
        weights = _remove(is_over, weights, log_ratio)
    if weights is not None:
        metrics["importance_weight"] = average(weights)
        metrics["importance_weight_square"] = average(weights.square())
    return weights, metrics


def gap_metrics(log_ratio: Tensor, average: BatchAverage) -> dict[str, Tensor]:
    """Compute scalar metrics that compare the log-probs of sampler and trainer.

    With ``d = log_ratio``, float [B, S], the trainer's log-prob minus the sampler's, and
    ``r = exp(d)``, these are means over sampled tokens, except for the maximum:

    - ``logprob_gap_mean``: ``|d|``. ``logprob_gap_max``: the largest ``|d|``, or 0 for no tokens.
    - ``kl_k1``, ``kl_k3``: KL(sampler ‖ trainer), ``-d`` and ``r - 1 - d`` (verl's kl, k3_kl).
    - ``reverse_kl_k1``, ``reverse_kl_k3``: KL(trainer ‖ sampler), ``r·d`` and ``r·d - r + 1``.
    - ``token_mult_prob_error``: ``exp|d|``, the factor between the two probabilities (NeMo-RL).
    - ``tokens_above_ln2``: share of tokens with ``|d| > ln 2``.
    """
    d = torch.where(average.mask, log_ratio, 0)
    gap = d.abs()
    clamped = d.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    r = clamped.exp()
    excess = torch.expm1(clamped)  # r - 1, exact also for small d
    return {
        "logprob_gap_mean": average(gap),
        "logprob_gap_max": gap.amax() if gap.numel() else gap.new_zeros(()),
        "kl_k1": average(-d),
        "kl_k3": average(excess - clamped),
        "reverse_kl_k1": average(r * clamped),
        "reverse_kl_k3": average(r * clamped - excess),
        "token_mult_prob_error": average(clamped.abs().exp()),
        "tokens_above_ln2": average((gap > math.log(2)).to(d.dtype)),
    }


def effective_sample_size(mean: float, mean_square: float) -> float:
    """Compute the effective sample size divided by n, ``(Σ w)² / (n · Σ w²)``, in [0, 1].

    ``mean``, ``mean_square``: means of the n weights and of their squares. Equal weights give 1.
    If all weights are 0, the result is NaN.
    """
    return mean**2 / mean_square if mean_square else math.nan


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _remove(removed: Tensor, weights: Tensor | None, like: Tensor) -> Tensor:
    """Set ``weights`` [B, S] to 0 where bool ``removed`` is True. None means that all are 1."""
    return torch.where(removed, 0, torch.ones_like(like) if weights is None else weights)
