"""Diagnostics of a run's health.

Shapes: ``B`` samples, ``S`` padded length. Masks are 1 for entries that count. Scalars are
0-dimensional tensors. An undefined quantity is NaN.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.losses.corrections import effective_sample_size

_NAN = float("nan")


class RoundingGap(NamedTuple):
    """Gap between the log-probs of sampler and trainer that rounding alone can explain.

    ``limit``: largest mean absolute gap in nats, if both use the same weights and the same
    distribution. ``name``: name of the precision.
    """

    name: str
    limit: float


# By `trainer.precision`.
ROUNDING_GAPS = {"32": RoundingGap("float32", 1e-4), "bf16": RoundingGap("bf16", 0.05)}


def gap_verdict(gap: float, precision: str) -> tuple[bool, str] | None:
    """Compare the mean ``gap`` between sampler and trainer, in nats, with the limit of rounding.

    The gap must belong to the weights that sampled. ``precision``: `trainer.precision`. Return
    whether rounding explains the gap, and the end of a sentence that begins with "it is". Return
    None if the precision is unknown or the gap is not finite.
    """
    rounding = ROUNDING_GAPS.get(precision)
    if rounding is None or not math.isfinite(gap):
        return None
    if gap <= rounding.limit:
        return True, f"what rounding in {rounding.name} gives."
    return False, (
        f"more than rounding in {rounding.name} gives: the engines disagree. docs/logprobs.md "
        "explains how to find the cause, docs/corrections.md how to correct it."
    )


def gap_warnings(metrics: Mapping[str, float], precision: str) -> tuple[str, ...]:
    """Return a warning if rounding does not explain the sampler's log-prob gap, else nothing.

    ``metrics``: metrics by full name. The rollout was sampled before the step's first update.
    """
    gap = metrics.get("sampler/logprob_gap_mean", _NAN)
    is_rounding, text = gap_verdict(gap, precision) or (True, "")
    return () if is_rounding else (f"sampler/logprob_gap_mean={gap:.2g}, {text}",)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Compute ``1 - Var(returns - values) / Var(returns)`` over the tokens with ``mask`` 1.

    ``values``, ``returns``: float [B, S]. ``mask``: [B, S]. The denominator of both variances, the
    number of counted tokens, cancels. NaN if the returns are constant up to rounding: returns of
    GAE are float32 sums with relative errors of about 1e-7.
    """
    counted = mask.bool()
    target = returns[counted].double()
    error = target - values[counted].double()
    total = _squared_deviations(target)
    is_spread = total > 1e-12 * target.square().sum()
    return torch.where(is_spread, 1 - _squared_deviations(error) / total, _NAN).float()


def reward_length_correlation(
    rewards: Tensor, lengths: Tensor, sample_mask: Tensor | None = None
) -> Tensor:
    """Compute the Pearson correlation of reward and response length over counted samples.

    ``rewards``: float [B]. ``lengths``: int [B], generated tokens. ``sample_mask``: [B], None
    counts all. NaN if either is constant.
    """
    counted = _bool_mask(sample_mask, rewards)
    x, y = rewards[counted].double(), lengths[counted].double()
    x, y = x - x.mean(), y - y.mean()
    scale = torch.sqrt(x.square().sum() * y.square().sum())
    return torch.where(scale > 0, (x * y).sum() / scale, _NAN).float()


def repeated_ngram_fraction(
    input_ids: Tensor,
    prompt_lengths: Tensor,
    input_lengths: Tensor,
    n: int = 3,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Compute the share of a response's n-grams that occur earlier in the same response.

    The share of a response is ``1 - distinct / all`` n-grams. The result is the mean over the
    responses with at least ``n`` tokens, NaN if all responses are shorter.

    ``input_ids``: int64 [B, S], prompt then response. ``prompt_lengths``, ``input_lengths``
    (prompt + response): int64 [B]. ``token_mask``: float [B, S] of conversations. Only n-grams of
    adjacent generated tokens count.
    """
    rows, length = input_ids.shape
    if length < n:
        return torch.tensor(_NAN)
    # Number the distinct n-grams of the batch by growing them one token at a time. This is exact,
    # and an index stays below B * S, so its product with the vocabulary fits int64.
    vocabulary = int(input_ids.max()) + 1
    ngram_ids = input_ids.long()
    for offset in range(1, n):
        grown_ids = ngram_ids[:, :-1] * vocabulary + input_ids[:, offset:]
        _, ngram_ids = torch.unique(grown_ids, return_inverse=True)
    # Count the n-grams that lie inside a response.
    starts = torch.arange(ngram_ids.shape[1], device=ngram_ids.device)
    inside = (starts >= prompt_lengths[:, None]) & (starts + n <= input_lengths[:, None])
    if token_mask is not None:
        inside &= (token_mask.unfold(1, n, 1) > 0).all(-1)
    totals = inside.sum(1)
    # One integer for (response, n-gram): sorting integers is much faster than sorting pairs.
    id_count = int(ngram_ids.max()) + 1
    keys = torch.arange(rows, device=ngram_ids.device)[:, None] * id_count + ngram_ids
    distinct = torch.bincount(torch.unique(keys[inside]) // id_count, minlength=rows)
    counted = totals > 0
    return (1 - distinct[counted] / totals[counted]).mean()


def statistics(values: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Compute ``mean``, ``std``, ``min`` and ``max`` of the entries that count.

    ``values``: [...] of any number type. ``mask``: [...] of the same shape, None counts all.
    Returns float32 scalars, NaN if no entry counts. ``std`` is unbiased, and 0 for one entry.
    """
    counted = values[_bool_mask(mask, values)].double()
    if counted.numel() == 0:
        return {name: torch.tensor(_NAN) for name in ("mean", "std", "min", "max")}
    std = counted.std() if counted.numel() > 1 else torch.zeros(())
    results = {"mean": counted.mean(), "std": std, "min": counted.min(), "max": counted.max()}
    return {name: value.float() for name, value in results.items()}


def rollout_metrics(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute the ``train_rollouts/`` and ``val_rollouts/`` metrics that need no model.

    The names of the result have no prefix. Every row counts, because the metrics describe the
    policy. Of conversations only the rewards of rows that count are used.

    ``batch``: of a rollout (`aligner.types`) ``input_ids`` int64 [B, S], ``input_lengths`` and
    ``prompt_lengths`` int64 [B], ``is_end`` bool [B], ``rewards`` float32 [B]. Of conversations
    also ``token_mask`` [B, S] and ``sample_mask`` float32 [B].
    """
    rewards, prompt_lengths = batch["rewards"], batch["prompt_lengths"]
    response_lengths, reward_mask, token_mask = batch["input_lengths"] - prompt_lengths, None, None
    if "turn_ids" in batch:
        token_mask, reward_mask = batch["token_mask"], batch["sample_mask"]
        response_lengths = token_mask.sum(1).long()
    reward, length = statistics(rewards, reward_mask), statistics(response_lengths)
    scalars = {
        "rewards": reward.pop("mean"),
        **{f"rewards_{name}": value for name, value in reward.items()},
        "generation_length": length.pop("mean"),
        **{f"generation_length_{name}": value for name, value in length.items()},
        "prompt_length": prompt_lengths.float().mean(),
        "fraction_of_samples_properly_ended": batch["is_end"].float().mean(),
        "reward_length_correlation": reward_length_correlation(
            rewards, response_lengths, reward_mask
        ),
        "repeated_ngram_fraction": repeated_ngram_fraction(
            batch["input_ids"], prompt_lengths, batch["input_lengths"], token_mask=token_mask
        ),
    }
    counts = {"num_samples": len(rewards), "generated_tokens": int(response_lengths.sum())}
    return {name: value.item() for name, value in scalars.items()} | counts


def update_metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the metrics of all updates of a step: mean, or extreme for ``*_max`` and ``*_min``.

    ``lr`` is the value of the last update. ``skipped_updates`` and ``empty_updates`` are counts.
    Means leave out updates that were skipped as not finite, and mini-batches without a counted
    entry. ``effective_sample_size`` is computed from the weights of each update.

    ``results``: one per pass over the rollout, in order.
    """
    series: dict[str, list[float]] = {}
    empty_updates = 0.0
    for result in results:
        metrics = dict(result["all_mb_metrics"])
        empty_flags = metrics.pop("empty", [])
        empty_updates += sum(empty_flags)
        for name, values in metrics.items():
            counted = [value for value, empty in zip_longest(values, empty_flags) if not empty]
            series.setdefault(name, []).extend(values if name == "lr" else counted)
    skipped = series.pop("skipped", [])
    rates = series.pop("lr", [])
    squares = series.pop("importance_weight_square", None)
    if squares is not None:
        pairs = zip(series["importance_weight"], squares, strict=True)
        series["effective_sample_size"] = [effective_sample_size(*pair) for pair in pairs]
    series.setdefault("grad_norm", [])
    return {
        **{name: _combine(name, values) for name, values in series.items()},
        "lr": rates[-1] if rates else 0.0,
        "skipped_updates": sum(skipped),
        "empty_updates": empty_updates,
    }


def idle_roles(**passes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the roles whose every update of a step was skipped as not finite.

    ``passes``: results of the step by role. A role without an update is not returned.
    """
    skipped = {
        role: [flag for result in results for flag in result["all_mb_metrics"].get("skipped", [])]
        for role, results in passes.items()
    }
    return tuple(role for role, flags in skipped.items() if flags and all(flags))


def count_updates(results: Sequence[Mapping[str, Any]]) -> int:
    """Count the optimizer updates in ``results``, including skipped and excluding empty updates."""
    passes = [result["all_mb_metrics"] for result in results]
    return sum(
        len(metrics.get("loss", [])) - int(sum(metrics.get("empty", []))) for metrics in passes
    )


def _squared_deviations(x: Tensor) -> Tensor:
    return (x - x.mean()).square().sum()


def _bool_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.bool()


def _combine(name: str, values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    if name.endswith("_max"):
        return max(finite)
    if name.endswith("_min"):
        return min(finite)
    return sum(finite) / len(finite)
