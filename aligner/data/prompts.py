"""Data sets of prompts, which are read, rendered and tokenized once at the start of a run."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from aligner.config import AskedDataConfig, DataConfig, ExampleDataConfig, PromptSourceConfig
from aligner.config.data import PromptColumns
from aligner.data import chat
from aligner.data.batches import Prompt
from aligner.data.dataset import Dataset, check_section
from aligner.data.readers import DataRow, take
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.tokenizer import Tokenizer, with_bos
from aligner.errors import ConfigError, DataError, raised_as

# Names of the reward function's arguments and of the trainer's columns, not allowed in data.
RESERVED_COLUMNS = frozenset(
    {"prompts", "responses", "ground_truths", "is_end", "response_lengths", chat.MESSAGES}
)


# Types of the section ``data``. Distillation may use the prompts of examples with responses.
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
        """See `Dataset.load`. ``has_ground_truth``: rows must have ``data.ground_truth_column``."""
        truth_column = None
        if isinstance(data, ExampleDataConfig):
            key, longest = "max_length", data.max_length
        else:
            key, longest = "max_prompt_length", data.max_prompt_length
            truth_column = data.ground_truth_column if has_ground_truth else None
        if data.prompt_column == truth_column:
            raise ConfigError(
                f"data.prompt_column and data.ground_truth_column are both {truth_column!r}. "
                "Set different columns"
            )
        # Rows become prompts. Prompts that are too long are dropped.
        check_section(data, tokenizer)
        make = partial(make_prompt, tokenizer=tokenizer, ground_truth_column=truth_column)
        keys = ["prompt_column", *([] if truth_column is None else ["ground_truth_column"])]
        return cls.read_rows(source, make, data, keys, longest=longest, key=key)

    @property
    def column_names(self) -> frozenset[str]:
        """Names of all rows' columns except prompt and ground truth. A row may lack columns."""
        return frozenset(name for prompt in self.items for name in prompt.columns)


class EpisodeDataset(PromptDataset):
    """Rows for environments, which build the prompts themselves. Items have no tokens."""

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

        ``longest_prompt``: maximum number of tokens of a prompt that the environment builds.
        ``ground_truth_column``: column with the ground truth to log, or None.
        """

        def episode(row: DataRow, index: int, data: Any) -> Prompt:
            truth = None if ground_truth_column is None else row.get(ground_truth_column)
            return Prompt(index, "", [], truth, dict(row.columns))

        episodes = cls.read_rows(source, episode, data, (), longest=None)
        episodes._longest_prompt = longest_prompt
        return episodes

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt in any turn."""
        return max(super().max_length, self._longest_prompt)


def columns_of_rows(sets: Mapping[str, PromptDataset | None]) -> dict[str, str | None]:
    """Find out which columns of the data are missing in a row.

    ``sets``: configuration key → data set. Returns name of a column → the first row without it, as
    text such as "row 3 of data.train", or None if all rows have the column.
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
    """Render and tokenize the prompt of one row. ``index`` becomes the prompt's id.

    Raises `DataError`, with location and columns of the row, if the row is invalid.
    """
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
                f"column {ground_truth_column!r} is {state}. Set data.ground_truth_column to "
                "another column, or to null if the data has no ground truths"
            )
        clash = sorted(RESERVED_COLUMNS & columns.keys())
        if clash:
            raise DataError(
                f"columns {clash} have names that are reserved for arguments of reward functions. "
                "Rename the columns"
            )
        # Render and tokenize the prompt.
        messages = None if isinstance(raw, str) else chat.parse_messages(raw)
        text = _render(messages or raw, columns, tokenizer, data)
        ids = tokenizer.encode(text)
        ids = with_bos(tokenizer, ids) if data.add_bos else ids
        if not ids:
            raise DataError(f"column {data.prompt_column!r} is empty. Remove the row")
    return Prompt(index, text, ids, ground_truth, columns, messages)


def _render(
    raw: str | list[Any], columns: Mapping[str, Any], tokenizer: Tokenizer, data: PromptSection
) -> str:
    policy = data.special_tokens_in_text
    raw = treat_special_tokens(tokenizer, raw, policy, data.prompt_column)
    if isinstance(raw, str) and not data.chat:
        check_plain_text(data)
        return raw
    # Render chats, and plain text as a message of the user.
    tools = treat_special_tokens(
        tokenizer, chat.parse_tools(columns, data.tools_column), policy, "tools"
    )
    messages = chat.with_system(chat.parse_messages(raw), data.system_prompt)
    chat.check_all_used(tokenizer, messages, tools)
    return chat.render(tokenizer, messages, tools)


def check_plain_text(data: PromptColumns) -> None:
    """Raise `DataError` if ``data`` has settings for chats, which plain text cannot use."""
    for key in ("system_prompt", "chat_template_kwargs"):
        if getattr(data, key) not in (None, {}):
            raise DataError(
                f"data.{key} is set, but the row is plain text and not a chat. Set data.chat=true "
                "to treat plain text as a user message, or remove the key"
            )
