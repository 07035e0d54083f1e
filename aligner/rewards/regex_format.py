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
        ground_truths: right answers, compared as text. Not used without an ``answer`` group.
        pattern: Python regular expression, in which ``.`` also matches newlines.
        format_reward: reward of a well-formed response with a wrong answer.

    Returns:
        A dict per response: ``accuracy`` (1 if the answer is right), ``well_formed`` (1 if the
        response matches) and ``reward``, which is 1 for a right answer, ``format_reward`` for
        another response that matches, else 0.
    """
    compiled = re.compile(pattern, re.DOTALL)
    scores = []
    for response, ground_truth in zip(responses, ground_truths, strict=True):
        match = compiled.fullmatch(response)
        # Without a group ``answer``, a match is right.
        is_well_formed = is_right = match is not None
        if match is not None and "answer" in compiled.groupindex:
            answer = match.group("answer")
            is_right = answer is not None and answer.strip() == str(ground_truth).strip()
        reward = format_reward if is_well_formed else 0.0
        if is_right:
            reward = 1.0
        metrics = {"accuracy": float(is_right), "well_formed": float(is_well_formed)}
        scores.append({"reward": reward, **metrics})
    return scores
