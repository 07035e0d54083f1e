"""The prompts of a run: read, rendered, tokenized and measured once, at the start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.data.chat import parse_tools, render_chat
from aligner.data.dataset import Dataset, read_items
from aligner.data.readers import Row, Source, take
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError, DataError, TokenizerError

# Names that the reward function's own arguments and the trainer's columns already have.
RESERVED_COLUMNS = frozenset(
    {"prompts", "responses", "ground_truths", "is_end", "response_lengths"}
)


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``id`` is its place in the source, counted before any was dropped."""

    id: int
    text: str  # as tokenized, the chat template included
    ids: list[int]
    ground_truth: Any
    columns: dict[str, Any] = field(default_factory=dict)  # every other column of the row

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)


@dataclass(frozen=True)
class PromptFormat:
    """Format by which a row becomes a prompt."""

    prompt_column: str = "prompt"  # text, or a list of chat messages
    ground_truth_column: str | None = "ground_truth"  # None: the data has none
    chat: bool = False  # plain text becomes a user message; messages always use the template
    system_prompt: str | None = None  # put before chat messages that have none
    tools_column: str | None = "tools"  # functions that a chat's assistant may call; None: none
    add_bos: bool = False  # begin with the BOS token, unless the text already does
    max_prompt_length: int | None = None  # in tokens; longer prompts are dropped and counted


class PromptDataset(Dataset[Prompt]):
    """All prompts, in the order of their source."""

    @classmethod
    def load(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        prompt_format: PromptFormat | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        limit: int | None = None,
        limit_key: str = "max_prompt_length",
    ) -> "PromptDataset":
        """Read, check and tokenize.

        Args:
            source: files or a generator function, see :func:`aligner.data.readers.read_rows`.
            tokenizer: the model's.
            prompt_format: how a row becomes a prompt.
            arguments: keyword arguments of a generator function.
            limit: read at most this many rows (an endless generator needs it).
            limit_key: the setting that ``prompt_format.max_prompt_length`` comes from.

        Raises:
            DataError: no rows, a missing column, a bad row (with file, line and the columns
                found), or nothing left after dropping what is too long.
        """
        prompt_format = prompt_format or PromptFormat()
        _check_format(prompt_format, tokenizer)
        prompts, dropped = read_items(
            source,
            lambda row, index: make_prompt(row, index, tokenizer, prompt_format),
            longest=prompt_format.max_prompt_length,
            what="prompts",
            key=limit_key,
            arguments=arguments,
            limit=limit,
        )
        return cls(prompts, dropped_too_long=dropped)

    @property
    def column_names(self) -> frozenset[str]:
        """Every further column that some row has; rows without it give None."""
        return frozenset(name for prompt in self._items for name in prompt.columns)


def make_prompt(row: Row, index: int, tokenizer: Tokenizer, prompt_format: PromptFormat) -> Prompt:
    """Turn one row into a prompt; errors name its place and content."""
    columns = dict(row.columns)
    try:
        raw = take(row, prompt_format.prompt_column, (str, list), "data.prompt_column")
        del columns[prompt_format.prompt_column]
        ground_truth = None
        if prompt_format.ground_truth_column is not None:
            ground_truth = _ground_truth(columns, prompt_format.ground_truth_column)
        clash = sorted(RESERVED_COLUMNS & columns.keys())
        if clash:
            raise DataError(
                f"columns {clash} have names that the reward function's own arguments have; "
                "rename them"
            )
        text = _render(raw, columns, tokenizer, prompt_format)
        ids = _encode(text, tokenizer, prompt_format)
    except DataError as error:
        raise DataError(f"{row.place}: {error}; columns found: {sorted(row.columns)}") from error
    return Prompt(index, text, ids, ground_truth, columns)


def _check_format(prompt_format: PromptFormat, tokenizer: Tokenizer) -> None:
    limit = prompt_format.max_prompt_length
    if limit is not None and limit < 1:
        raise ConfigError(f"data: max_prompt_length={limit} must be at least 1 token")
    if prompt_format.prompt_column == prompt_format.ground_truth_column:
        raise ConfigError(
            f"data: prompt and ground truth are both column {prompt_format.prompt_column!r}"
        )
    if prompt_format.add_bos and tokenizer.bos_id is None:
        raise TokenizerError("data: add_bos=true but the tokenizer has no BOS token")


def _ground_truth(columns: dict[str, Any], name: str) -> Any:
    if columns.get(name) is None:
        raise DataError(
            f"column {name!r} is {'null' if name in columns else 'missing'}; name another with "
            "data.ground_truth_column, or set data.ground_truth_column=null if the data has none"
        )
    return columns.pop(name)


def _render(
    raw: str | list[Any],
    columns: Mapping[str, Any],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
) -> str:
    if isinstance(raw, str) and not prompt_format.chat:
        return raw
    return render_chat(
        tokenizer,
        raw,
        system_prompt=prompt_format.system_prompt,
        tools=parse_tools(columns, prompt_format.tools_column),
    )


def _encode(text: str, tokenizer: Tokenizer, prompt_format: PromptFormat) -> list[int]:
    ids = tokenizer.encode(text)
    bos = tokenizer.bos_id
    if prompt_format.add_bos and bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    if not ids:
        raise DataError(f"column {prompt_format.prompt_column!r} is empty: it has no token")
    return ids
