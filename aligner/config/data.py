"""Sources of prompts, and the columns of their rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import StrictBool, StrictStr

from aligner.config.combinations import ReadIf
from aligner.config.environment import WITHOUT_ENVIRONMENT
from aligner.config.fields import Count, Positive, Source, SpecialTokensInText


@dataclass(frozen=True)
class PromptSourceConfig:
    """Source of a set of prompts: files or generator functions."""

    source: Source | tuple[Source, ...]
    """Files or generator functions: one, or a list. A source is a file (`.jsonl`, `.json`, `.csv`,
    `.parquet`, `.arrow`), a pattern such as `data/*.jsonl`, a directory of `.jsonl` or `.parquet`
    files or of `datasets.save_to_disk`, or a function, `package.module:function` or
    `path/to/file.py:function`."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a generator function."""

    limit: Count | None = None
    """Maximum number of rows to read. `null` means all rows."""


SEPARATE_RESPONSE = ReadIf(
    lambda run: (
        getattr(run.data, "messages_column", None) is None
        and getattr(run.data, "text_column", None) is None
    ),
    "applies to rows of a prompt and a response, but data.messages_column or data.text_column "
    "names complete examples",
)


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """Columns that form a prompt, in every kind of data."""

    prompt_column: Annotated[StrictStr, WITHOUT_ENVIRONMENT, SEPARATE_RESPONSE] = "prompt"
    """Column of the prompt: text, or a list of chat messages."""

    tools_column: Annotated[StrictStr | None, WITHOUT_ENVIRONMENT] = "tools"
    """Column of functions that a chat's assistant may call. `null` means no such column. A cell
    contains JSON schemas, or their text."""

    chat: Annotated[StrictBool, WITHOUT_ENVIRONMENT, SEPARATE_RESPONSE] = False
    """Use plain text as the user message of a chat. Lists of messages are always chats."""

    system_prompt: Annotated[StrictStr | None, WITHOUT_ENVIRONMENT] = None
    """System message for chats without one. `null` adds none."""

    chat_template_kwargs: Mapping[StrictStr, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`. The template must use
    each variable."""

    special_tokens_in_text: SpecialTokensInText = "keep"
    """Special tokens in the text of rows or messages: `keep`, `refuse` or `escape`. See
    docs/ppo.md#special-tokens-in-text."""

    add_bos: Annotated[StrictBool, WITHOUT_ENVIRONMENT] = False
    """Begin a prompt with the BOS token, unless its text already does."""


@dataclass(frozen=True)
class TrainingSets:
    """Training and validation data of a run."""

    train: PromptSourceConfig
    """Training data."""

    validation: PromptSourceConfig | None = None
    """Validation data, with the same keys as `train`. `null` means no validation."""

    weights: tuple[Positive, ...] | None = None
    """Weights of the sources of `train`, in their order. An epoch has as many examples as all
    sources together, in proportion to the weights. `null` means that each example occurs once."""

    shuffle: StrictBool = True
    """Shuffle the training data in an order that depends on seed and epoch."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error if the number of weights differs from the number of sources."""
        source = self.train.source
        count = 1 if isinstance(source, str) else len(source)
        if self.weights is not None and len(self.weights) != count:
            yield (
                f"{key}.weights={list(self.weights)} has {len(self.weights)} numbers, and "
                f"{key}.train.source has {count} sources. Give a number for each source"
            )


@dataclass(frozen=True, kw_only=True)
class AnsweredColumns(PromptColumns):
    """Columns of a prompt, and of the ground truth with which its response is scored."""

    ground_truth_column: StrictStr | None = "ground_truth"
    """Column of ground truths, for the reward function. `null` means no such column."""

    max_prompt_length: Count | None = None
    """Maximum number of tokens in a prompt. Longer prompts are dropped. `null` means no limit."""


@dataclass(frozen=True)
class DataConfig(AnsweredColumns, TrainingSets):
    """Training and validation prompts."""
