"""Estimates from several sampled responses to each prompt, with standard errors.

Shapes: ``P`` prompts, ``n`` responses to each. An estimate is the mean over prompts of a value that
is unbiased for its prompt. Its standard error treats prompts, not responses, as independent
samples.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Z95 = 1.959963984540054  # standard deviations on each side that contain 95 % of a normal variable


class Estimate(NamedTuple):
    """A mean over prompts and its standard error. The error is None for a single prompt."""

    value: float
    error: float | None


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of P values and its standard error, ``sqrt(unbiased variance / P)``."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def pass_at_k(right: Sequence[float], k: int) -> float:
    """Estimate the probability that at least one of ``k`` sampled responses is right.

    ``right``: scores of n sampled responses. A response is right if its score is at least 0.5. With
    c right responses the estimate is ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of Chen
    et al. (2021), "Evaluating Large Language Models Trained on Code".
    """
    count, hits = len(right), sum(value >= 0.5 for value in right)
    return 1.0 - math.comb(count - hits, k) / math.comb(count, k)


def majority_at_k(right: Sequence[float], answers: Sequence[Hashable | None], k: int) -> float:
    """Compute the accuracy of the most frequent of ``k`` answers (self-consistency).

    Wang et al. 2022. ``right``: scores from 0 to 1 of n responses. ``answers``: their final
    answers. Each ``k`` adjacent responses form a group, whose accuracy is the score of the most
    frequent answer, or the mean score of several equally frequent answers. Responses with the
    answer None are ignored. A group without other answers has accuracy 0. Returns the mean over
    groups.
    """
    starts = range(0, len(right) - k + 1, k)
    return math.fsum(
        _majority(right[start : start + k], answers[start : start + k]) for start in starts
    ) / len(starts)


def _majority(right: Sequence[float], answers: Sequence[Hashable | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    most_votes = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most_votes]
    scores = [value for value, answer in zip(right, answers, strict=True) if answer in winners]
    return math.fsum(scores) / len(scores) if scores else 0.0


def ks_of(count: int) -> list[int]:
    """Return the values of k to report: the powers of two up to ``count``, and ``count`` itself."""
    powers = [1 << power for power in range(count.bit_length())]
    return sorted({*powers, count})


def answer_estimates(
    right: Sequence[Sequence[float]], answers: Sequence[Sequence[Hashable | None]]
) -> dict[str, Estimate]:
    """Estimate ``mean_at_n``, ``pass_at_k`` and ``maj_at_k`` for n responses to each of P prompts.

    ``right``: P lists of n scores from 0 to 1. ``answers``: P lists of n final answers. k takes the
    values of `ks_of`. ``maj_at_k`` begins at k = 3, because two different answers have no majority.
    """
    count = len(right[0])
    estimates = {f"mean_at_{count}": mean_over_prompts([math.fsum(row) / count for row in right])}
    for k in ks_of(count):
        estimates[f"pass_at_{k}"] = mean_over_prompts([pass_at_k(row, k) for row in right])
    for k in ks_of(count):
        if k >= 3:
            rows = zip(right, answers, strict=True)
            estimates[f"maj_at_{k}"] = mean_over_prompts([majority_at_k(*row, k) for row in rows])
    return estimates
