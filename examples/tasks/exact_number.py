"""Verifier of the arithmetic task: the response must be exactly the number, and end properly."""

import re
from typing import Any

# Each number has one valid spelling: ASCII digits, no plus sign, no leading zero, no minus zero, no
# separators, no trailing zeros after the point. Otherwise a policy could learn odd spellings.
_NUMBER = re.compile(r"(?!-0$)-?(0|[1-9][0-9]*)(\.[0-9]*[1-9])?")


def reward(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[Any],
    is_end: list[bool],
    *,
    prefix: str = "",
) -> list[dict[str, float]]:
    r"""Return reward 1 if the response is exactly the ground truth and ends properly, else 0.

    For the ground truth 21 these responses are right: ``"21\n"``, ``"21\n\n"``, and ``"21"`` with
    ``is_end`` (EOS, or a removed stop string). These are wrong: ``"21"`` truncated by the length
    limit, ``"21 "``, ``" 21\n"``, ``"021\n"``, ``"+21\n"``, ``"21.\n"``, ``"21\n5+5="``,
    ``"2１\n"``.

    Args:
        prompts: ignored.
        responses: text without the end-of-sequence token.
        ground_truths: numbers, or numbers as text.
        is_end: whether the response ended by itself.
        prefix: required text before the number, such as ``" "`` for prompts that end in ``=``
            without a space.

    Returns:
        ``reward`` and ``accuracy`` (equal), and ``well_formed``: 1 for any proper number.
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
        raise ValueError(
            f"the ground truth {ground_truth!r} is not a number. Write plain digits, such as 21"
        )
    return text
