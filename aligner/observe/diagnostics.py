"""Diagnostics of a run's health. Pure functions; every denominator is stated.

Shapes: ``B`` samples, ``S`` padded length. Masks are 1 where an entry counts and come from
lengths. Scalars are 0-dimensional tensors, NaN where a quantity is undefined.
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
    """Rounding of one precision, by its ``name``.

    ``limit``: most that it makes of the mean absolute gap between the log-probs of sampler and
    trainer, in nats, where both have the same weights and sample from the same distribution.
    """

    name: str
    limit: float


# By `trainer.precision`.
ROUNDING_GAPS = {"32": RoundingGap("float32", 1e-4), "bf16": RoundingGap("bf16", 0.05)}


class GapVerdict(NamedTuple):
    """Verdict on a gap; ``text``: words that follow "it is"."""

    is_rounding: bool
    text: str


def gap_verdict(gap: float, precision: str) -> GapVerdict | None:
    """Compare a mean ``gap`` of sampler and trainer, in nats, with what rounding gives.

    Meant for a gap of the weights that sampled. ``precision``: `trainer.precision`. None: the
    precision is not known, or the gap is not finite.
    """
    rounding = ROUNDING_GAPS.get(precision)
    if rounding is None or not math.isfinite(gap):
        return None
    if gap <= rounding.limit:
        return GapVerdict(True, f"what rounding in {rounding.name} gives.")
    return GapVerdict(
        False,
        f"more than rounding in {rounding.name} gives: the engines disagree. docs/logprobs.md says "
        "where to look, docs/corrections.md what corrects.",
    )


def gap_warnings(metrics: Mapping[str, float], precision: str) -> tuple[str, ...]:
    """Words for the console where the gap of a step is above rounding; none elsewhere.

    ``metrics``: of a step that the weights before its first update sampled, under full names.
    """
    gap = metrics.get("sampler/logprob_gap_mean", _NAN)
    verdict = gap_verdict(gap, precision)
    if verdict is None or verdict.is_rounding:
        return ()
    return (f"sampler/logprob_gap_mean={gap:.2g}, {verdict.text}",)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """``1 - Var(returns - values) / Var(returns)`` over the tokens where ``mask`` is 1.

    ``values``, ``returns``: float [B, S]; ``mask``: [B, S]. Both variances have the same
    denominator (counted tokens), which cancels. NaN where the returns are constant up to rounding:
    those of GAE are sums in float32 that differ by some 1e-7 of their size.
    """
    kept = mask.bool()
    target = returns[kept].double()
    error = target - values[kept].double()
    total = _squares(target)
    is_spread = total > 1e-12 * target.square().sum()
    return torch.where(is_spread, 1 - _squares(error) / total, _NAN).float()


def reward_length_correlation(
    rewards: Tensor, lengths: Tensor, sample_mask: Tensor | None = None
) -> Tensor:
    """Pearson correlation of reward and response length over the samples that count.

    ``rewards``: float [B]; ``lengths``: int [B], generated tokens; ``sample_mask``: [B], None: all
    count. NaN where either is constant.
    """
    kept = _all_or(sample_mask, rewards)
    x, y = rewards[kept].double(), lengths[kept].double()
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
    """Share of a response's n-grams that occurred earlier in the same response.

    ``input_ids``: int64 [B, S], prompt then response; ``prompt_lengths``, ``input_lengths``
    (prompt + response): int64 [B]. ``token_mask``: float [B, S], of conversations: n-grams of what
    was generated, token behind token, count. Per response ``1 - distinct / all`` n-grams, then
    the mean over the responses with at least ``n`` tokens; NaN where there is none.
    """
    rows, length = input_ids.shape
    if length < n:
        return torch.tensor(_NAN)
    # Number the distinct n-grams of the batch, growing them by one token at a time: exact, and
    # a number stays below B * S, so the product with the vocabulary fits int64.
    vocabulary = int(input_ids.max()) + 1
    gram = input_ids.long()
    for offset in range(1, n):
        grown = gram[:, :-1] * vocabulary + input_ids[:, offset:]
        _, gram = torch.unique(grown, return_inverse=True)
    starts = torch.arange(gram.shape[1], device=gram.device)
    inside = (starts >= prompt_lengths[:, None]) & (starts + n <= input_lengths[:, None])
    if token_mask is not None:
        inside &= (token_mask.unfold(1, n, 1) > 0).all(-1)
    # One number for (response, n-gram): sorting numbers is much faster than sorting pairs.
    numbers = int(gram.max()) + 1
    keys = torch.arange(rows, device=gram.device)[:, None] * numbers + gram
    distinct = torch.unique(keys[inside])
    every = inside.sum(1)
    unique = torch.bincount(distinct // numbers, minlength=rows)
    counted = every > 0
    return (1 - unique[counted] / every[counted]).mean()


def fraction_terminated(is_end: Tensor, sample_mask: Tensor | None = None) -> Tensor:
    """Share of the samples that count whose response terminated; ``is_end``: bool [B]."""
    return is_end[_all_or(sample_mask, is_end)].float().mean()


def statistics(values: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """``mean``, ``std`` (unbiased; 0 for one entry), ``min``, ``max`` over the entries that count.

    ``values``: [...], of any number type; ``mask``: [...], of the same shape, None: all count.
    Returns float32 scalars, NaN where nothing counts.
    """
    kept = values[_all_or(mask, values)].double()
    if kept.numel() == 0:
        return {name: torch.tensor(_NAN) for name in ("mean", "std", "min", "max")}
    std = kept.std() if kept.numel() > 1 else torch.zeros(())
    found = {"mean": kept.mean(), "std": std, "min": kept.min(), "max": kept.max()}
    return {name: value.float() for name, value in found.items()}


def rollout_metrics(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics of ``train_rollouts/`` and ``val_rollouts/`` that need no model, without the prefix.

    ``batch``: of a rollout (`aligner.types`) ``input_ids`` int64 [B, S], ``input_lengths`` and
    ``prompt_lengths`` int64 [B], ``is_end`` bool [B], ``rewards`` float32 [B]. Every row is a
    generated sample and counts: the metrics describe the policy. Of conversations also
    ``token_mask`` and ``sample_mask`` float32 [B]: rewards are those of the rows that count.
    """
    rewards, prompts = batch["rewards"], batch["prompt_lengths"]
    lengths, counts = batch["input_lengths"] - prompts, None
    if "turn_ids" in batch:
        lengths, counts = batch["token_mask"].sum(1).long(), batch["sample_mask"]
    reward, length = statistics(rewards, counts), statistics(lengths)
    numbers = {
        "rewards": reward.pop("mean"),
        **{f"rewards_{name}": value for name, value in reward.items()},
        "generation_length": length.pop("mean"),
        **{f"generation_length_{name}": value for name, value in length.items()},
        "prompt_length": prompts.float().mean(),
        "fraction_of_samples_properly_ended": fraction_terminated(batch["is_end"]),
        "reward_length_correlation": reward_length_correlation(rewards, lengths, counts),
        "repeated_ngram_fraction": repeated_ngram_fraction(
            batch["input_ids"],
            prompts,
            batch["input_lengths"],
            token_mask=batch["token_mask"] if "turn_ids" in batch else None,
        ),
    }
    counts = {"num_samples": len(rewards), "generated_tokens": int(lengths.sum())}
    return {name: value.item() for name, value in numbers.items()} | counts


def update_metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics over all updates of a step: the mean, or for ``*_max`` and ``*_min`` the extreme.

    ``results``: one per pass over the rollout, in order. ``lr`` is that of the last update,
    ``skipped_updates`` and ``empty_updates`` are counts; an update that was skipped because it was
    not finite, and a mini-batch of which nothing counted, take no part in means.
    ``effective_sample_size`` is that of each update's weights.
    """
    series: dict[str, list[float]] = {}
    empty = 0.0
    for result in results:
        found = dict(result["all_mb_metrics"])
        flags = found.pop("empty", [])
        empty += sum(flags)
        for name, values in found.items():
            kept = [value for value, flag in zip_longest(values, flags) if not flag]
            series.setdefault(name, []).extend(values if name == "lr" else kept)
    skipped = series.pop("skipped", [])
    rates = series.pop("lr", [])
    norms = series.pop("grad_norm", [])
    squares = series.pop("importance_weight_square", None)
    if squares is not None:
        pairs = zip(series["importance_weight"], squares, strict=True)
        series["effective_sample_size"] = [effective_sample_size(*pair) for pair in pairs]
    metrics = {name: _combine(name, values) for name, values in series.items()}
    return {
        **metrics,
        "grad_norm": _combine("grad_norm", norms),
        "lr": rates[-1] if rates else 0.0,
        "skipped_updates": sum(skipped),
        "empty_updates": empty,
    }


def idle_roles(**passes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The roles that were to be updated and whose every update was skipped as not finite.

    ``passes``: for each role the results of a step.
    """
    skipped = {
        role: [one for result in results for one in result["all_mb_metrics"].get("skipped", [])]
        for role, results in passes.items()
    }
    return tuple(role for role, each in skipped.items() if each and all(each))


def count_updates(results: Sequence[Mapping[str, Any]]) -> int:
    """Optimizer updates that ``results`` stand for, skipped ones included, empty ones not."""
    passes = [result["all_mb_metrics"] for result in results]
    return sum(len(found.get("loss", [])) - int(sum(found.get("empty", []))) for found in passes)


def _squares(x: Tensor) -> Tensor:
    return (x - x.mean()).square().sum()


def _all_or(mask: Tensor | None, like: Tensor) -> Tensor:
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
