"""Sources of prompts, and the format by which a row becomes one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import StrictBool, StrictStr

from aligner.config.combinations import ReadIf
from aligner.config.environment import WITHOUT_ENVIRONMENT
from aligner.config.fields import Count, Source, SpecialTokensInText


@dataclass(frozen=True)
class PromptSourceConfig:
    """One set of prompts."""

    source: Source | tuple[Source, ...]
    """Files, a generator function, or a list of them.

    A `.jsonl` or `.parquet` file, a directory of them, or a function, `package.module:function` or
    `path/to/file.py:function`.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a generator function."""

    limit: Count | None = None
    """Rows to read at most. `null` means all."""


SEPARATE_RESPONSE = ReadIf(
    lambda run: getattr(run.data, "messages_column", None) is None,
    "is for rows of a prompt and a response, and data.messages_column names a whole chat",
)


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """Columns of a row that make a prompt, in every kind of data."""

    prompt_column: Annotated[StrictStr, WITHOUT_ENVIRONMENT, SEPARATE_RESPONSE] = "prompt"
    """Column of text or of a list of chat messages."""

    tools_column: Annotated[StrictStr | None, WITHOUT_ENVIRONMENT] = "tools"
    """Column of functions that a chat's assistant may call. `null` means none.

    For rows that have it: JSON schemas, or their text.
    """

    chat: Annotated[StrictBool, WITHOUT_ENVIRONMENT, SEPARATE_RESPONSE] = False
    """Plain text becomes the user's message of a chat; lists of messages always do."""

    system_prompt: Annotated[StrictStr | None, WITHOUT_ENVIRONMENT] = None
    """Put before chat messages that bring none. `null` means nothing."""

    chat_template_kwargs: Mapping[StrictStr, Any] = field(default_factory=dict)
    """Variables for the chat template, as `{enable_thinking: false}`; it must name each."""

    special_tokens_in_text: SpecialTokensInText = "keep"
    """Treatment of special and added tokens that rows or messages spell.

    `keep`: they become tokens; `refuse`: an error names the row and the token; `escape`: U+200B
    after the first character makes ordinary text of them.
    """

    add_bos: Annotated[StrictBool, WITHOUT_ENVIRONMENT] = False
    """Begin with the BOS token, unless the text already does."""


@dataclass(frozen=True)
class TrainingSets:
    """Data of a training run."""

    train: PromptSourceConfig
    """Training data."""

    validation: PromptSourceConfig | None = None
    """Validation data, as `train`. `null` means no validation."""

    shuffle: StrictBool = True
    """Shuffle the training data, by seed and epoch."""


@dataclass(frozen=True, kw_only=True)
class AnsweredColumns(PromptColumns):
    """Columns of a row that make a prompt whose response is scored."""

    ground_truth_column: StrictStr | None = "ground_truth"
    """Column of ground truths. `null` means the data has none.

    The reward function is given it as `ground_truths`. An environment is given it as any other
    column, and rows may be without it; it is shown with samples.
    """

    max_prompt_length: Count | None = None
    """Tokens of a prompt; longer ones are dropped and counted. `null` means none are."""


@dataclass(frozen=True)
class DataConfig(AnsweredColumns, TrainingSets):
    """Training and validation prompts."""
