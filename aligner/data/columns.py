"""Columns by the names of other libraries, for rows without the columns of the configuration.

A column is taken if the configuration keeps the default name, the rows lack a column of this name,
and exactly one other name of `NAMES` occurs. The first row of a source decides for the source.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from aligner.data.readers import DataRow
from aligner.data.tokenizers.decoding import common_prefix
from aligner.errors import DataError

_CHATS = ("messages", "conversations")
# Key of a section → other names of its column.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt_column": ("question", "query", "instruction", "problem", *_CHATS),
    "response_column": ("completion", "answer", "output", "solution"),
    "ground_truth_column": ("reward_model.ground_truth", "answer", "solution"),
    "chosen_column": (),
    "rejected_column": (),
    "label_column": (),
}


def recognised(
    row: DataRow, data: Any, keys: Collection[str]
) -> tuple[Any, Callable[[DataRow], list[DataRow]], list[str]]:
    """Recognise the columns for ``keys`` in a source whose first row is ``row``.

    Returns the section ``data`` with the names of the columns, a function from a row of the source
    to rows with these columns, and descriptions of what was recognised.
    """
    names_by_key = {key: _column_name(row, data, key) for key in keys}
    # Complete chats or text, instead of a prompt and a response.
    if getattr(data, "messages_column", "") is None and _lacks(names_by_key, "response_column"):
        chats = [name for name in _CHATS if isinstance(row.columns.get(name), list)]
        is_text = isinstance(row.columns.get("text"), str)
        if data.text_column is None and len(chats) == 1:
            names_by_key = {"messages_column": chats[0]}
        elif data.text_column is None and is_text and _lacks(names_by_key, "prompt_column"):
            names_by_key = {"text_column": "text"}
    names = {
        key: name for key, name in names_by_key.items() if name not in (None, getattr(data, key))
    }
    taken = [f"data.{key}={name}" for key, name in names.items()]
    # Reward functions may read the column of a recognised ground truth, too.
    steps: list[Callable[[DataRow], list[DataRow]]] = []
    if truth := names.pop("ground_truth_column", None):
        steps.append(lambda row: [_with(row, {data.ground_truth_column: row.get(truth)})])
    # Pairs without a prompt, and pairs as labelled responses.
    pair = [row.get(getattr(data, f"{name}_column", "")) for name in ("chosen", "rejected")]
    is_text = "chosen_column" in keys and all(isinstance(answer, str) for answer in pair)
    if is_text and _lacks(names_by_key, "prompt_column"):
        taken.append("the prompt is the common beginning of both responses")
        steps.append(lambda row: [_without_common_prompt(row, data)])
    is_labelled = any(not _lacks(names_by_key, f"{name}_column") for name in ("response", "label"))
    if "label_column" in keys and None not in pair and not is_labelled:
        taken.append("a labelled response from each response of a pair")
        answers = {data.chosen_column: True, data.rejected_column: False}
        steps.append(
            lambda row: [
                _with(row, {data.response_column: row.get(name), data.label_column: is_good})
                for name, is_good in answers.items()
            ]
        )

    def rows(row: DataRow) -> list[DataRow]:
        result = [row]
        for step in steps:
            result = [new for old in result for new in step(old)]
        return result

    return replace(data, **names) if names else data, rows, taken


def _lacks(names_by_key: Mapping[str, str | None], key: str) -> bool:
    return key in names_by_key and names_by_key[key] is None


def _column_name(row: DataRow, data: Any, key: str) -> str | None:
    """Return the name of the column for ``key``, None if the row has none or several."""
    name: str | None = getattr(data, key)
    default = next(field.default for field in fields(data) if field.name == key)
    if name != default or name is None or name in row.columns or row.get(name) is not None:
        return name
    others = [other for other in NAMES[key] if row.get(other) is not None]
    return others[0] if len(others) == 1 else None


def _with(row: DataRow, columns: Mapping[str, Any]) -> DataRow:
    return row._replace(columns={**row.columns, **columns})


def _without_common_prompt(row: DataRow, data: Any) -> DataRow:
    """Split the text with which both responses begin from a pair, up to the last whole word."""
    pair = {name: row.get(name) for name in (data.chosen_column, data.rejected_column)}
    if not all(isinstance(answer, str) for answer in pair.values()):
        raise DataError(f"{row.location}: columns {' and '.join(map(repr, pair))} must be text")
    chosen, rejected = pair.values()
    prompt = chosen[: common_prefix(chosen, rejected)]
    if any(re.match(r"\w", answer[len(prompt) :]) for answer in pair.values()):
        prompt = re.sub(r"\w+\Z", "", prompt)
    prompt = prompt.rstrip(" ")
    if not prompt:
        raise DataError(
            f"{row.location}: column {data.prompt_column!r} is missing, and the responses "
            f"{' and '.join(map(repr, pair))} do not begin with the same prompt. Name the column "
            f"of the prompt with data.prompt_column. {row.remedy}"
        )
    answers = {name: answer[len(prompt) :] for name, answer in pair.items()}
    return _with(row, {data.prompt_column: prompt, **answers})
