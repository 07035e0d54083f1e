"""Mathematical equality of the final answer, by the package math-verify."""

import threading
from typing import Any

from aligner.packages import require_extra

require_extra("math", "aligner.rewards.math_verify")


def reward(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[Any],
    *,
    boxed: bool = False,
    sample_limit_s: int = 5,
) -> list[dict[str, float]]:
    r"""Reward 1 where the response's final answer equals the ground truth (``1/2`` = ``0.5``).

    Args:
        prompts: not looked at.
        responses: text without the end-of-sequence token; the answer may be in ``\boxed{}``, in
            dollars, or a plain number.
        ground_truths: numbers, or LaTeX with or without dollars or ``\boxed{}``.
        boxed: only count an answer in ``\boxed{}``.
        sample_limit_s: longest time for one comparison, which then counts as wrong. It works in
            the reward process only: it needs signals, which threads do not get.

    Returns:
        ``reward`` and ``accuracy`` (the same), and ``well_formed``: an answer was found.
    """
    from math_verify import parse, verify  # sympy takes a while to import

    limit = sample_limit_s if threading.current_thread() is threading.main_thread() else None
    scores = []
    for response, ground_truth in zip(responses, ground_truths, strict=True):
        gold = parse(_as_latex(ground_truth), parsing_timeout=limit)
        if not gold:
            raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")
        answer = parse(response, _extraction(boxed), parsing_timeout=limit)
        right = float(bool(answer) and verify(gold, answer, timeout_seconds=limit))
        scores.append({"reward": right, "accuracy": right, "well_formed": float(bool(answer))})
    return scores


def _as_latex(ground_truth: Any) -> str:
    text = str(ground_truth).strip()
    return text if "$" in text or r"\boxed" in text else rf"$\boxed{{{text}}}$"


def _extraction(boxed: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    if not boxed:
        return [LatexExtractionConfig(), ExprExtractionConfig()]
    return [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
