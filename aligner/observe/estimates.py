"""Estimates from several sampled responses to each prompt, and their confidence.

Shapes: ``P`` prompts, ``n`` responses to each. Every estimate is a mean over prompts of a number
that is unbiased for the prompt, and its standard error is that of this mean: prompts are
independent samples, responses to one prompt are not.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Z95 = 1.959963984540054  # the normal distribution holds 95 % within this many deviations


class Estimate(NamedTuple):
    """A mean over prompts; ``error``: its standard error, None of a single prompt."""

    value: float
    error: float | None


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """Mean and ``sqrt(variance / P)`` of a number per prompt, the variance unbiased."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def pass_at_k(right: Sequence[float], k: int) -> float:
    """Probability that at least one of ``k`` of these responses is right.

    ``1 - C(n - c, k) / C(n, k)``, c of n right: the unbiased estimator of Chen et al. (2021),
    "Evaluating Large Language Models Trained on Code". A response is right from 0.5 on.
    """
    count, hits = len(right), sum(value >= 0.5 for value in right)
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {count} responses")
    return 1.0 - math.comb(count - hits, k) / math.comb(count, k)


def majority_at_k(right: Sequence[float], answers: Sequence[Hashable | None], k: int) -> float:
    """Accuracy of the most frequent of ``k`` answers (self-consistency, Wang et al. 2022).

    Mean over the ``n // k`` groups of adjacent responses. Responses without an answer have no vote;
    of several answers that are equally frequent each counts its share; where the verdicts on one
    answer differ, their mean counts. No vote at all: 0.
    """
    if not 1 <= k <= len(right):
        raise ValueError(f"maj@{k} of {len(right)} responses")
    starts = range(0, len(right) - k + 1, k)
    return math.fsum(
        _majority(right[start : start + k], answers[start : start + k]) for start in starts
    ) / len(starts)


def _majority(right: Sequence[float], answers: Sequence[Hashable | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    shares = [
        math.fsum(value for value, one in zip(right, answers, strict=True) if one == winner) / most
        for winner in winners
    ]
    return math.fsum(shares) / len(shares) if shares else 0.0


def ks_of(count: int) -> list[int]:
    """1, 2, 4 … and ``count`` itself: the k that are worth a number."""
    powers = [1 << power for power in range(count.bit_length())]
    return sorted({*powers, count})


def answer_estimates(
    right: Sequence[Sequence[float]], answers: Sequence[Sequence[Hashable | None]]
) -> dict[str, Estimate]:
    """``mean_at_n``, ``pass_at_k`` and ``maj_at_k`` over P prompts with n responses each.

    ``right``: P lists of n numbers from 0 to 1; ``answers``: as many final answers. k of
    `ks_of`; maj@k from 3 on, for a majority of two is one of them.
    """
    count = len(right[0])
    found = {f"mean_at_{count}": mean_over_prompts([math.fsum(row) / count for row in right])}
    for k in ks_of(count):
        found[f"pass_at_{k}"] = mean_over_prompts([pass_at_k(row, k) for row in right])
    for k in ks_of(count):
        if k >= 3:
            rows = zip(right, answers, strict=True)
            found[f"maj_at_{k}"] = mean_over_prompts([majority_at_k(*row, k) for row in rows])
    return found
