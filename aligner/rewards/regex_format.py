"""Rewards responses that match a pattern and contain the right answer."""

import re
from typing import Any


def reward(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[Any],
    *,
    pattern: str,
    format_reward: float = 0.0,
) -> list[dict[str, float]]:
    r"""Return reward 1 for responses that match ``pattern`` from the first to the last character.

    A pattern with a group named ``answer`` also requires the right answer: the group's text
    without surrounding blanks must equal the ground truth's. Example::

        pattern: '<think>.*?</think>\s*<answer>(?P<answer>[^<]*)</answer>\s*'

    Args:
        prompts: not used.
        responses: text without the end-of-sequence token.
        ground_truths: compared as text. Not used without an ``answer`` group.
        pattern: Python regular expression, in which ``.`` also matches newlines.
        format_reward: reward of a well-formed response with a wrong answer.

    Returns:
        For each response ``reward``, ``accuracy`` (1 if the answer is right) and ``well_formed`` (1
        if the response matches). ``reward`` is 1 if right, ``format_reward`` if only well-formed,
        else 0.
    """
    compiled = re.compile(pattern, re.DOTALL)
    scores = []
    for response, ground_truth in zip(responses, ground_truths, strict=True):
        match = compiled.fullmatch(response)
        # Without a group ``answer``, a match is right.
        right = match is not None
        if match is not None and "answer" in compiled.groupindex:
            answer = match.group("answer")
            right = answer is not None and answer.strip() == str(ground_truth).strip()
        reward = 1.0 if right else format_reward if match else 0.0
        scores.append(
            {"reward": reward, "accuracy": float(right), "well_formed": float(match is not None)}
        )
    return scores
