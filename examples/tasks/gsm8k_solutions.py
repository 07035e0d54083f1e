"""Pairs of right and wrong solutions of GSM8K problems, written by models.

A row of the published ``example_model_solutions.jsonl`` contains a question and, from each of four
models, ``{"is_correct": ..., "solution": ...}``. A problem with right and wrong solutions yields
pairs.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from aligner.data.readers import Source, read_rows
from aligner.errors import ConfigError, DataError


def solution_pairs(
    path: Source,
    split: str = "train",
    *,
    seed: int = 0,
    validation_fraction: float = 0.4,
    pairs_per_problem: int = 1,
    prefix: str = "",
    suffix: str = "\n",
) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns prompt, chosen (a right solution) and rejected (a wrong one).

    Args:
        path: ``example_model_solutions.jsonl`` as published, or files with the same columns.
        split: ``train`` or ``validation``, whose problems are disjoint.
        seed: seed of the split, and of the selection of pairs in each problem.
        validation_fraction: share of the problems that is held out.
        pairs_per_problem: most pairs of a problem, all different.
        prefix: text before each question.
        suffix: text after each question.

    Raises:
        DataError: a row lacks a question or solutions. The message names file and line.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f"gsm8k solutions: split={split!r} must be train or validation")
    if not 0 < validation_fraction < 1 or pairs_per_problem < 1:
        raise ConfigError(
            f"gsm8k solutions: validation_fraction={validation_fraction} must lie between 0 and 1 "
            f"and pairs_per_problem={pairs_per_problem} be at least 1"
        )
    for row in read_rows(path):
        question, right, wrong = _solutions(row.columns, row.location)
        # The question decides the split, so that its pairs are in one split.
        generator = random.Random(f"{seed}/{question}")
        if (generator.random() < validation_fraction) != (split == "validation"):
            continue
        pairs = [(chosen, rejected) for chosen in right for rejected in wrong]
        for chosen, rejected in generator.sample(pairs, min(pairs_per_problem, len(pairs))):
            prompt = f"{prefix}{question}{suffix}"
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _solutions(columns: Mapping[str, Any], location: str) -> tuple[str, list[str], list[str]]:
    """Return the question and its different right and wrong solutions in order."""
    question = columns.get("question")
    solutions = [value for value in columns.values() if _is_solution(value)]
    if not isinstance(question, str) or not solutions:
        raise DataError(
            f"{location}: needs a question and solutions {{is_correct, solution}}. Columns found: "
            f"{sorted(columns)}"
        )
    right, wrong = (
        list(dict.fromkeys(item["solution"] for item in solutions if item["is_correct"] is kind))
        for kind in (True, False)
    )
    return question, right, wrong


def _is_solution(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("is_correct"), bool)
        and isinstance(value.get("solution"), str)
    )
