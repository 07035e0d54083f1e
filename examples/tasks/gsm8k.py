"""GSM8K (Cobbe et al. 2021): grade-school word problems whose answers are numbers.

A row of the published files is ``{"question": ..., "answer": ...}``; the answer is a worked
solution whose last line holds the number after ``####``::

    Natalia sold 48/2 = <<48/2=24>>24 clips in May. ...
    #### 72

That number, written plainly, is the ground truth; `aligner.rewards.math_verify` compares with it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from aligner.data.readers import Source, read_rows
from aligner.errors import DataError

MARK = "####"
# A currency sign or a unit may stand around the number: "$1,080", "12.50 dollars", "75%".
_NUMBER = re.compile(
    r"(?P<sign>[-−]?)\s*[$€£]?\s*(?P<whole>\d{1,3}(?:,\d{3})+|\d+)?(?P<part>\.\d+)?\s*[^\d.,/]*"
)


def gsm8k_prompts(path: Source, *, prefix: str = "", suffix: str = "") -> Iterator[dict[str, Any]]:
    r"""Yield a row for every problem, with the columns prompt, ground_truth, question, answer.

    Args:
        path: ``train.jsonl`` or ``test.jsonl`` as published, or files with the same columns.
        prefix: written before each question.
        suffix: written after it, such as where the answer must stand (``\boxed{}``).

    Raises:
        DataError: a row without question or answer, or an answer without a number after
            ``####``; the message names file and line.
    """
    for row in read_rows(path):
        question, answer = (_text(row.columns, name, row.place) for name in ("question", "answer"))
        yield {
            "prompt": f"{prefix}{question}{suffix}",
            "ground_truth": final_number(answer, row.place),
            "question": question,
            "answer": answer,
        }


def gsm8k_examples(
    path: Source, *, prefix: str = "", suffix: str = "", mark: str = MARK
) -> Iterator[dict[str, Any]]:
    """Yield a row for every problem, with the columns prompt and response, the worked solution.

    ``mark`` stands before its final number; the other arguments are those of `gsm8k_prompts`.
    """
    for row in gsm8k_prompts(path, prefix=prefix, suffix=suffix):
        worked, _, final = row["answer"].rpartition(MARK)
        yield {"prompt": row["prompt"], "response": f"{worked}{mark}{final}"}


def final_number(answer: str, place: str) -> str:
    """The number after ``####``: ASCII digits without separators, currency, unit or idle zeros."""
    _, mark, final = answer.rpartition(MARK)
    if not mark:
        raise DataError(f"{place}: the answer has no {MARK} before its final number: {answer!r}")
    match = _NUMBER.fullmatch(final.strip())
    if match is None or not (match["whole"] or match["part"]):
        raise DataError(
            f"{place}: {final.strip()!r} after {MARK} is not a number. Write digits, with commas "
            "between thousands and a unit if need be"
        )
    whole = (match["whole"] or "0").replace(",", "").lstrip("0") or "0"
    part = (match["part"] or "").rstrip("0").rstrip(".")
    sign = "-" if match["sign"] and (whole, part) != ("0", "") else ""
    return f"{sign}{whole}{part}"


def _text(columns: Mapping[str, Any], name: str, place: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str) or not value.strip():
        found = "missing" if name not in columns else f"{value!r}"
        raise DataError(
            f"{place}: column {name!r} must hold text and is {found}; columns found: "
            f"{sorted(columns)}"
        )
    return value
