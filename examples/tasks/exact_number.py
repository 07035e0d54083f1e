"""The verifier of the arithmetic task: exactly the number, terminated."""

import re
from typing import Any

# A number has one spelling here: ASCII digits, no plus sign, no leading zero, no minus zero, no
# separators, no trailing zeros after the point. Otherwise a policy could find odd spellings.
_NUMBER = re.compile(r"(?!-0$)-?(0|[1-9][0-9]*)(\.[0-9]*[1-9])?")


def reward(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[Any],
    is_end: list[bool],
    *,
    prefix: str = "",
) -> list[dict[str, float]]:
    r"""Reward 1 where the response is the ground truth and nothing else, and terminated.

    Right for the ground truth 21: ``"21\n"``; ``"21\n\n"``; ``"21"`` with ``is_end`` (EOS, or a
    stop string that was cut off). Wrong: ``"21"`` cut off by the length limit, ``"21 "``,
    ``" 21\n"``, ``"021\n"``, ``"+21\n"``, ``"21.\n"``, ``"21\n5+5="``, ``"2１\n"``.

    Args:
        prompts: not looked at.
        responses: text without the end-of-sequence token.
        ground_truths: numbers, or text that spells one.
        is_end: whether the response ended by itself.
        prefix: must stand before the number, such as ``" "`` for prompts that end in ``=``
            without a space.

    Returns:
        ``reward`` and ``accuracy`` (the same), and ``well_formed``: some number, terminated.
    """
    scores = []
    for response, ground_truth, ended in zip(responses, ground_truths, is_end, strict=True):
        number = _read_number(response, prefix, ended)
        right = float(number is not None and number == _spell(ground_truth))
        scores.append(
            {"reward": right, "accuracy": right, "well_formed": float(number is not None)}
        )
    return scores


def _read_number(response: str, prefix: str, ended: bool) -> str | None:
    body = response.rstrip("\n")
    if not (ended or len(body) < len(response)) or not body.startswith(prefix):
        return None
    number = body[len(prefix) :]
    return number if _NUMBER.fullmatch(number) else None


def _spell(ground_truth: Any) -> str:
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    text = str(ground_truth).strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"the ground truth {ground_truth!r} is not a plainly spelt number")
    return text
