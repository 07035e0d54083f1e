"""Prompts of a run, which are read, rendered and tokenized once at the start.

Batches are right-padded. Lengths, not ids, define the padding.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from aligner.config import AskedDataConfig, DataConfig, ExampleDataConfig, PromptSourceConfig
from aligner.config.data import PromptColumns
from aligner.data.batches import Prompt
from aligner.data.chat import (
    MESSAGES,
    check_all_used,
    parse_messages,
    parse_tools,
    render,
    with_system,
)
from aligner.data.dataset import Dataset, check_section
from aligner.data.readers import DataRow, take
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.tokenizer import Tokenizer, with_bos
from aligner.errors import ConfigError, DataError, raised_as

# Names of the reward function's arguments and of the trainer's columns.
RESERVED_COLUMNS = frozenset(
    {"prompts", "responses", "ground_truths", "is_end", "response_lengths", MESSAGES}
)


# Sections that define the conversion of rows. A student may use the prompts of worked examples.
PromptSection = DataConfig | AskedDataConfig | ExampleDataConfig


class PromptDataset(Dataset[Prompt]):
    """All prompts, in the order of their source."""

    noun = "prompts"

    @classmethod
    def load(
        cls,
        source: PromptSourceConfig,
        tokenizer: Tokenizer,
        data: PromptSection,
        *,
        has_ground_truth: bool = True,
    ) -> Self:
        """Read, check and tokenize, see `aligner.data.dataset.Dataset.load`.

        ``has_ground_truth``: whether ``data.ground_truth_column`` is read.
        """
        truth_column = None
        if isinstance(data, ExampleDataConfig):
            key, longest = "max_length", data.max_length
        else:
            key, longest = "max_prompt_length", data.max_prompt_length
            truth_column = data.ground_truth_column if has_ground_truth else None
        if data.prompt_column == truth_column:
            raise ConfigError(f"data: prompt and ground truth are both column {truth_column!r}")
        # Rows become prompts. Prompts that are too long are dropped.
        check_section(data, tokenizer)
        make = partial(make_prompt, tokenizer=tokenizer, ground_truth_column=truth_column)
        keys = ["prompt_column", *([] if truth_column is None else ["ground_truth_column"])]
        return cls.read_rows(source, make, data, keys, longest=longest, key=key)

    @property
    def column_names(self) -> frozenset[str]:
        """Names of all other columns of the rows. A row without a column has None."""
        return frozenset(name for prompt in self.items for name in prompt.columns)


class EpisodeDataset(PromptDataset):
    """Rows for environments. The environments build the prompts, so items have no tokens."""

    noun = "rows"
    _longest_prompt = 0

    @classmethod
    def read(
        cls,
        source: PromptSourceConfig,
        longest_prompt: int,
        ground_truth_column: str | None,
        data: DataConfig | AskedDataConfig | None = None,
    ) -> Self:
        """Read all rows of ``source``. The environment receives every column.

        ``longest_prompt``: maximum tokens of a prompt. ``ground_truth_column``: shown with samples.
        """

        def episode(row: DataRow, index: int, data: Any) -> Prompt:
            truth = None if ground_truth_column is None else row.get(ground_truth_column)
            return Prompt(index, "", [], truth, dict(row.columns))

        episodes = cls.read_rows(source, episode, data, (), longest=None)
        episodes._longest_prompt = longest_prompt
        return episodes

    @property
    def max_length(self) -> int:
        """Number of tokens of the longest prompt of any turn."""
        return max(super().max_length, self._longest_prompt)


def columns_of_rows(sets: Mapping[str, PromptDataset | None]) -> dict[str, str | None]:
    """Map each column of the rows of ``sets`` to a row without it, or to None if all have it.

    ``sets``: configuration key → data set.
    """
    rows = [
        (key, prompts[index])
        for key, prompts in sets.items()
        if prompts is not None
        for index in range(len(prompts))
    ]
    return {
        name: next((f"row {row.id} of {key}" for key, row in rows if name not in row.columns), None)
        for name in dict.fromkeys(name for _, row in rows for name in row.columns)
    }


def make_prompt(
    row: DataRow,
    index: int,
    tokenizer: Tokenizer,
    data: PromptSection,
    ground_truth_column: str | None = None,
) -> Prompt:
    """Convert one row to a prompt. Errors name the row and its columns."""
    columns = dict(row.columns)
    with raised_as(DataError, row.location, DataError, remedy=row.remedy):
        # Separate the prompt and the ground truth from the other columns.
        raw = take(row, data.prompt_column, (str, list), "data.prompt_column")
        columns.pop(data.prompt_column, None)
        ground_truth = row.get(ground_truth_column) if ground_truth_column else None
        columns.pop(ground_truth_column or "", None)
        if ground_truth_column is not None and ground_truth is None:
            state = "null" if ground_truth_column in row.columns else "missing"
            raise DataError(
                f"column {ground_truth_column!r} is {state}. Name another column with "
                "data.ground_truth_column, or set data.ground_truth_column=null if the data has "
                "none"
            )
        clash = sorted(RESERVED_COLUMNS & columns.keys())
        if clash:
            raise DataError(
                f"columns {clash} have the names of arguments of the reward function. Rename the "
                "columns"
            )
        # Render and tokenize the prompt.
        messages = None if isinstance(raw, str) else parse_messages(raw)
        text = _render(messages or raw, columns, tokenizer, data)
        ids = tokenizer.encode(text)
        ids = with_bos(tokenizer, ids) if data.add_bos else ids
        if not ids:
            raise DataError(f"column {data.prompt_column!r} is empty")
    return Prompt(index, text, ids, ground_truth, columns, messages)


def _render(
    raw: str | list[Any], columns: Mapping[str, Any], tokenizer: Tokenizer, data: PromptSection
) -> str:
    policy = data.special_tokens_in_text
    raw = treat_special_tokens(tokenizer, raw, policy, data.prompt_column)
    if isinstance(raw, str) and not data.chat:
        check_plain_text(data)
        return raw
    # Chats, and plain text as the user's message.
    tools = treat_special_tokens(
        tokenizer, parse_tools(columns, data.tools_column), policy, "tools"
    )
    messages = with_system(parse_messages(raw), data.system_prompt)
    check_all_used(tokenizer, messages, tools)
    return render(tokenizer, messages, tools)


def check_plain_text(data: PromptColumns) -> None:
    """Raise `DataError` if the section has keys for chats, but the row is plain text."""
    for key in ("system_prompt", "chat_template_kwargs"):
        if getattr(data, key) not in (None, {}):
            raise DataError(
                f"data.{key} is set, but the row is plain text, which cannot include it. Set "
                "data.chat=true, or write it into the rows"
            )
