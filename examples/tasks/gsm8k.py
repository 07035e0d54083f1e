"""GSM8K (Cobbe et al. 2021): grade-school word problems whose answers are numbers.

A row of the published files is ``{"question": ..., "answer": ...}``. The answer is a solution whose
last line contains the number after ``####``::

    Natalia sold 48/2 = <<48/2=24>>24 clips in May. ...
    #### 72

The ground truth is this number in plain digits, which `aligner.rewards.math_verify` compares.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from aligner.data.readers import Source, read_rows
from aligner.errors import DataError

MARK = "####"
# The number may have a currency sign or a unit: "$1,080", "12.50 dollars", "75%".
_NUMBER = re.compile(
    r"(?P<sign>[-−]?)\s*[$€£]?\s*(?P<whole>\d{1,3}(?:,\d{3})+|\d+)?(?P<part>\.\d+)?\s*[^\d.,/]*"
)


def gsm8k_prompts(path: Source, *, prefix: str = "", suffix: str = "") -> Iterator[dict[str, Any]]:
    r"""Yield a row for every problem, with the columns prompt, ground_truth, question, answer.

    Args:
        path: ``train.jsonl`` or ``test.jsonl`` as published, or files with the same columns.
        prefix: text before each question.
        suffix: text after each question, such as instructions for the answer (``\boxed{}``).

    Raises:
        DataError: a row lacks question or answer, or an answer lacks a number after ``####``. The
            message names file and line.
    """
    for row in read_rows(path):
        question, answer = (
            _text(row.columns, name, row.location) for name in ("question", "answer")
        )
        yield {
            "prompt": f"{prefix}{question}{suffix}",
            "ground_truth": final_number(answer, row.location),
            "question": question,
            "answer": answer,
        }


def gsm8k_examples(
    path: Source, *, prefix: str = "", suffix: str = "", mark: str = MARK
) -> Iterator[dict[str, Any]]:
    """Yield a row for every problem, with the columns prompt and response, the solution.

    ``mark`` precedes the final number. The other arguments are those of `gsm8k_prompts`.
    """
    for row in gsm8k_prompts(path, prefix=prefix, suffix=suffix):
        worked, _, final = row["answer"].rpartition(MARK)
        yield {"prompt": row["prompt"], "response": f"{worked}{mark}{final}"}


def final_number(answer: str, location: str) -> str:
    """Return the number after ``####`` in ASCII digits, without separators, unit or extra zeros.

    ``location``: file and line of the row, for messages.
    """
    _, mark, final = answer.rpartition(MARK)
    if not mark:
        raise DataError(f"{location}: the answer has no {MARK} before its final number: {answer!r}")
    match = _NUMBER.fullmatch(final.strip())
    if match is None or not (match["whole"] or match["part"]):
        raise DataError(
            f"{location}: {final.strip()!r} after {MARK} is not a number. Write digits, optionally "
            "with commas between thousands and a unit"
        )
    digits = (match["whole"] or "0").replace(",", "").lstrip("0") or "0"
    part = (match["part"] or "").rstrip("0").rstrip(".")
    sign = "-" if match["sign"] and (digits, part) != ("0", "") else ""
    return f"{sign}{digits}{part}"


def _text(columns: Mapping[str, Any], name: str, location: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str) or not value.strip():
        status = "missing" if name not in columns else f"{value!r}"
        raise DataError(
            f"{location}: column {name!r} must contain text and is {status}. Columns found: "
            f"{sorted(columns)}"
        )
    return value
