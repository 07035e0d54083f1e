"""Recognition of columns that have the names of other libraries' data formats.

A column of another name is used if the configuration has the default name of the column, the row
lacks it, and has exactly one of the other names in `NAMES`. The first row of a source decides for
all its rows.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from aligner.data.readers import DataRow
from aligner.data.tokenizers.decoding import common_prefix
from aligner.errors import DataError

_CHATS = ("messages", "conversations")
# Key of the section ``data`` → other names of the column.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt_column": ("question", "query", "instruction", "problem", *_CHATS),
    "response_column": ("completion", "answer", "output", "solution"),
    "ground_truth_column": ("reward_model.ground_truth", "answer", "solution"),
    "chosen_column": (),
    "rejected_column": (),
    "label_column": (),
}


def recognise(
    row: DataRow, data: Any, keys: Collection[str]
) -> tuple[Any, Callable[[DataRow], list[DataRow]], list[str]]:
    """Find out by a source's first ``row`` which columns the source has for ``keys``.

    ``keys``: keys of the configuration section ``data`` that name columns. Returns a copy of
    ``data`` with the names of the columns, a function that converts a row of the source to rows
    with these columns, and a text about each recognised column.
    """
    names_by_key = {key: _column_name(row, data, key) for key in keys}
    # Use complete chats or text if there is no response.
    if getattr(data, "messages_column", "") is None and _lacks(names_by_key, "response_column"):
        chats = [name for name in _CHATS if isinstance(row.columns.get(name), list)]
        has_text = isinstance(row.columns.get("text"), str)
        if data.text_column is None and len(chats) == 1:
            names_by_key = {"messages_column": chats[0]}
        elif data.text_column is None and has_text and _lacks(names_by_key, "prompt_column"):
            names_by_key = {"text_column": "text"}
    names = {
        key: name for key, name in names_by_key.items() if name not in (None, getattr(data, key))
    }
    texts = [f"data.{key}={name}" for key, name in names.items()]
    # A step converts a row. The first copies the ground truth to its default column, because reward
    # functions may also read it in the column of the source.
    steps: list[Callable[[DataRow], list[DataRow]]] = []
    if truth := names.pop("ground_truth_column", None):
        steps.append(lambda row: [_with(row, {data.ground_truth_column: row.get(truth)})])
    # Split the prompt off the responses of a pair, and convert pairs to labelled responses.
    pair = [row.get(getattr(data, f"{name}_column", "")) for name in ("chosen", "rejected")]
    is_text_pair = "chosen_column" in keys and all(isinstance(answer, str) for answer in pair)
    if is_text_pair and _lacks(names_by_key, "prompt_column"):
        texts.append("the prompt is the common beginning of both responses")
        steps.append(lambda row: [_without_common_prompt(row, data)])
    is_labelled = any(not _lacks(names_by_key, f"{name}_column") for name in ("response", "label"))
    if "label_column" in keys and None not in pair and not is_labelled:
        texts.append("each response of a pair is a labelled response")
        answers = {data.chosen_column: True, data.rejected_column: False}
        steps.append(
            lambda row: [
                _with(row, {data.response_column: row.get(name), data.label_column: is_good})
                for name, is_good in answers.items()
            ]
        )

    def convert(row: DataRow) -> list[DataRow]:
        rows = [row]
        for step in steps:
            rows = [new for old in rows for new in step(old)]
        return rows

    return replace(data, **names) if names else data, convert, texts


def _lacks(names_by_key: Mapping[str, str | None], key: str) -> bool:
    return key in names_by_key and names_by_key[key] is None


def _column_name(row: DataRow, data: Any, key: str) -> str | None:
    """Return the name of the row's column for ``key``, or None if there are none or several."""
    name: str | None = getattr(data, key)
    default = next(field.default for field in fields(data) if field.name == key)
    if name != default or name is None or name in row.columns or row.get(name) is not None:
        return name
    others = [other for other in NAMES[key] if row.get(other) is not None]
    return others[0] if len(others) == 1 else None


def _with(row: DataRow, columns: Mapping[str, Any]) -> DataRow:
    return row._replace(columns={**row.columns, **columns})


def _without_common_prompt(row: DataRow, data: Any) -> DataRow:
    """Move the common beginning of both responses, up to the last whole word, to the prompt."""
    pair = {name: row.get(name) for name in (data.chosen_column, data.rejected_column)}
    if not all(isinstance(answer, str) for answer in pair.values()):
        raise DataError(
            f"{row.location}: columns {' and '.join(map(repr, pair))} must be text, because the "
            f"first row of the source has text. Correct the row, or set data.prompt_column"
        )
    chosen, rejected = pair.values()
    prompt = chosen[: common_prefix(chosen, rejected)]
    if any(re.match(r"\w", answer[len(prompt) :]) for answer in pair.values()):
        prompt = re.sub(r"\w+\Z", "", prompt)
    prompt = prompt.rstrip(" ")
    if not prompt:
        raise DataError(
            f"{row.location}: column {data.prompt_column!r} is missing, and the responses "
            f"{' and '.join(map(repr, pair))} do not begin with the same prompt. Set "
            f"data.prompt_column to the column of the prompt. {row.remedy}"
        )
    answers = {name: answer[len(prompt) :] for name, answer in pair.items()}
    return _with(row, {data.prompt_column: prompt, **answers})
