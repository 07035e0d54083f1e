"""Metrics that show whether a run is healthy.

Shapes: ``B`` samples, ``S`` padded length. Masks are 1 for elements to include. Scalars are
0-dimensional tensors. An undefined quantity is NaN.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from aligner.losses.corrections import effective_sample_size

# By `trainer.precision`: its name, and the largest difference between log-probs of sampler and
# trainer that rounding can cause. This is the mean absolute difference in nats for equal weights.
ROUNDING_GAPS = {"32": ("float32", 1e-4), "bf16": ("bf16", 0.05)}


def gap_verdict(gap: float, precision: str) -> tuple[bool, str] | None:
    """Decide whether rounding explains the log-prob ``gap`` between sampler and trainer.

    ``gap``: mean absolute difference in nats, with equal weights. ``precision``: value of
    ``trainer.precision``. Returns (whether rounding explains the gap, text that continues "The gap
    is"), or None if the precision is not in `ROUNDING_GAPS` or the gap is not finite.
    """
    if precision not in ROUNDING_GAPS or not math.isfinite(gap):
        return None
    name, limit = ROUNDING_GAPS[precision]
    if gap <= limit:
        return True, f"what rounding in {name} gives."
    return False, (
        f"more than rounding in {name} gives: the engines disagree. docs/logprobs.md "
        "explains how to find the cause, docs/corrections.md how to correct it."
    )


def gap_warnings(metrics: Mapping[str, float], precision: str) -> tuple[str, ...]:
    """Return a tuple with a warning if rounding does not explain the log-prob gap, else ().

    ``metrics``: metrics of a step by full name. Its ``sampler/logprob_gap_mean`` must have been
    measured before the first update of the step.
    """
    gap = metrics.get("sampler/logprob_gap_mean", math.nan)
    is_rounding, text = gap_verdict(gap, precision) or (True, "")
    return () if is_rounding else (f"sampler/logprob_gap_mean={gap:.2g}, {text}",)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Compute ``1 - Var(returns - values) / Var(returns)`` over the tokens with ``mask`` 1.

    ``values``, ``returns``: float [B, S]. ``mask``: [B, S]. Returns a float32 scalar, NaN if the
    returns are constant up to float32 rounding.
    """
    included = mask.bool()
    target = returns[included].double()
    error = target - values[included].double()
    total = _squared_deviations(target)
    varies = total > 1e-12 * target.square().sum()  # returns have relative errors of about 1e-7
    return torch.where(varies, 1 - _squared_deviations(error) / total, math.nan).float()


def reward_length_correlation(
    rewards: Tensor, lengths: Tensor, sample_mask: Tensor | None = None
) -> Tensor:
    """Compute the Pearson correlation of reward and response length, a float32 scalar.

    ``rewards``: float [B]. ``lengths``: int [B], number of generated tokens. ``sample_mask``: [B],
    1 for samples to include (None: all). Returns NaN if all rewards or all lengths are equal.
    """
    included = _bool_mask(sample_mask, rewards)
    x, y = rewards[included].double(), lengths[included].double()
    x, y = x - x.mean(), y - y.mean()
    scale = torch.sqrt(x.square().sum() * y.square().sum())
    return torch.where(scale > 0, (x * y).sum() / scale, math.nan).float()


def repeated_ngram_fraction(
    input_ids: Tensor,
    prompt_lengths: Tensor,
    input_lengths: Tensor,
    n: int = 3,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Compute the share of n-grams that occur earlier in the same response, a scalar.

    The share in a response is ``1 - distinct n-grams / all n-grams``. Returns the mean over
    responses of at least ``n`` tokens, NaN if there are none.

    ``input_ids``: int64 [B, S], prompt then response. ``prompt_lengths``, ``input_lengths`` (prompt
    and response): int64 [B]. ``token_mask``: float [B, S], for conversations: only n-grams whose
    tokens all have mask 1 (generated tokens) are counted.
    """
    rows, length = input_ids.shape
    if length < n:
        return torch.tensor(math.nan)
    # Give each distinct n-gram an id, by adding one token at a time. Ids stay below B * S, so the
    # product with the vocabulary's size fits int64.
    vocabulary = int(input_ids.max()) + 1
    ngram_ids = input_ids.long()
    for offset in range(1, n):
        longer = ngram_ids[:, :-1] * vocabulary + input_ids[:, offset:]  # (id, next token)
        _, ngram_ids = torch.unique(longer, return_inverse=True)
    # Count the n-grams that lie inside a response.
    starts = torch.arange(ngram_ids.shape[1], device=ngram_ids.device)
    inside = (starts >= prompt_lengths[:, None]) & (starts + n <= input_lengths[:, None])
    if token_mask is not None:
        inside &= (token_mask.unfold(1, n, 1) > 0).all(-1)
    totals = inside.sum(1)
    # Count distinct pairs (response, n-gram id). As single integers, they are sorted much faster.
    id_count = int(ngram_ids.max()) + 1
    keys = torch.arange(rows, device=ngram_ids.device)[:, None] * id_count + ngram_ids
    distinct = torch.bincount(torch.unique(keys[inside]) // id_count, minlength=rows)
    has_ngrams = totals > 0
    return (1 - distinct[has_ngrams] / totals[has_ngrams]).mean()


def statistics(values: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Compute ``mean``, ``std``, ``min`` and ``max`` of the values with mask 1.

    ``values``: [...], any number type. ``mask``: [...], same shape (None: include all). Returns
    float32 scalars by name, NaN if no value is included. ``std`` is unbiased, 0 for one value.
    """
    included = values[_bool_mask(mask, values)].double()
    if included.numel() == 0:
        return {name: torch.tensor(math.nan) for name in ("mean", "std", "min", "max")}
    std = included.std() if included.numel() > 1 else torch.zeros(())
    results = {"mean": included.mean(), "std": std, "min": included.min(), "max": included.max()}
    return {name: value.float() for name, value in results.items()}


def rollout_metrics(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute metrics of a rollout from its rewards, lengths and tokens.

    The names in the result have no prefix ``train_rollouts/`` or ``val_rollouts/``. Samples that
    are excluded from training count, except for the rewards of conversations.

    ``batch``: ``input_ids`` int64 [B, S], ``input_lengths`` and ``prompt_lengths`` int64 [B],
    ``is_end`` bool [B], ``rewards`` float32 [B]. Conversations also have ``turn_ids`` [B, S],
    ``token_mask`` [B, S] and ``sample_mask`` float32 [B].
    """
    rewards, prompt_lengths = batch["rewards"], batch["prompt_lengths"]
    response_lengths = batch["input_lengths"] - prompt_lengths
    reward_mask = token_mask = None  # all samples and tokens count
    if "turn_ids" in batch:  # in a conversation, only tokens of the policy count
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
    """Combine the metrics of a step's optimizer updates.

    Each metric is averaged, except names ending in ``_max`` or ``_min`` (extremum) and ``lr`` (last
    value). Updates skipped because of NaN or infinity, and updates without an unmasked token, are
    excluded. The result counts them as ``skipped_updates`` and ``empty_updates``.

    ``results``: results of the training calls, one for each pass over the rollout. Their entry
    ``all_mb_metrics`` is a dict from metric to list, with one value per update.
    """
    values_by_name: dict[str, list[float]] = {}
    empty_updates = 0.0
    for result in results:
        metrics = dict(result["all_mb_metrics"])
        empty_flags = metrics.pop("empty", [])  # absent if no update was empty
        empty_updates += sum(empty_flags)
        for name, values in metrics.items():
            # Leave out empty updates, except for the learning rate. Missing flags mean: not empty.
            nonempty = [x for x, is_empty in zip_longest(values, empty_flags) if not is_empty]
            values_by_name.setdefault(name, []).extend(values if name == "lr" else nonempty)
    skipped_flags = values_by_name.pop("skipped", [])
    learning_rates = values_by_name.pop("lr", [])
    # Means of weights w and of w² become the effective sample size.
    squares = values_by_name.pop("importance_weight_square", None)
    if squares is not None:
        weights = zip(values_by_name["importance_weight"], squares, strict=True)
        values_by_name["effective_sample_size"] = [effective_sample_size(*pair) for pair in weights]
    values_by_name.setdefault("grad_norm", [])  # NaN if every update was empty
    return {
        **{name: _combine(name, values) for name, values in values_by_name.items()},
        "lr": learning_rates[-1] if learning_rates else 0.0,
        "skipped_updates": sum(skipped_flags),
        "empty_updates": empty_updates,
    }


def idle_roles(**passes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the roles for which all updates of a step were skipped because of NaN or infinity.

    ``passes``: for each role (``policy``, ``critic``) the results of the training calls, one for
    each pass over the rollout. A role without updates is not returned.
    """
    skipped = {
        role: [flag for result in results for flag in result["all_mb_metrics"].get("skipped", [])]
        for role, results in passes.items()
    }
    return tuple(role for role, flags in skipped.items() if flags and all(flags))


def count_updates(results: Sequence[Mapping[str, Any]]) -> int:
    """Count a step's optimizer updates. Skipped updates count, empty updates do not."""
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
