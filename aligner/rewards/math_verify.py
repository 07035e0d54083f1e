"""Rewards final answers that equal the ground truth mathematically, by package math-verify."""

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
    r"""Return reward 1 if the response's final answer equals the ground truth (``1/2`` = ``0.5``).

    Args:
        prompts: not used.
        responses: text without the end-of-sequence token. The answer may be in ``\boxed{}``, in
            dollar signs, or a plain number.
        ground_truths: numbers, or LaTeX with or without dollar signs or ``\boxed{}``.
        boxed: only accept an answer in ``\boxed{}``.
        sample_limit_s: time limit of one comparison in seconds. After the limit the answer counts
            as wrong. The limit uses a signal, so it only works in a process's main thread.

    Returns:
        A dict per response: ``reward`` and ``accuracy``, which are equal, and ``well_formed`` (1 if
        the response has an answer).
    """
    # Imported here, because importing sympy takes seconds.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify limits the time by a signal, which only the main thread can receive.
    limit = sample_limit_s if threading.current_thread() is threading.main_thread() else None
    extraction: list[Any] = [LatexExtractionConfig(), ExprExtractionConfig()]
    if boxed:  # search in \boxed{} first, and nowhere else
        extraction = [
            LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
        ]
    scores = []
    for response, ground_truth in zip(responses, ground_truths, strict=True):
        text = str(ground_truth).strip()
        latex = text if "$" in text or r"\boxed" in text else rf"$\boxed{{{text}}}$"
        gold = parse(latex, parsing_timeout=limit)
        if not gold:
            cause = f"math-verify cannot read the ground truth {ground_truth!r}"
            raise ValueError(f"{cause}. Give a number or a LaTeX formula")
        answer = parse(response, extraction, parsing_timeout=limit)
        reward = float(bool(answer) and verify(gold, answer, timeout_seconds=limit))
        scores.append({"reward": reward, "accuracy": reward, "well_formed": float(bool(answer))})
    return scores
