"""Sources of prompts, and the format by which a row becomes one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.config.fields import Count, Source


@dataclass(frozen=True)
class PromptSourceConfig:
    """One set of prompts."""

    # .jsonl or .parquet files, directories of them, or a generator function
    # (package.module:function or path/to/file.py:function); one or a list.
    source: Source | tuple[Source, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of a generator
    limit: Count | None = None  # read at most so many rows; null: all


@dataclass(frozen=True)
class DataConfig:
    """Training and validation prompts."""

    train: PromptSourceConfig
    validation: PromptSourceConfig | None = None  # null: no validation
    prompt_column: str = "prompt"  # text, or a list of chat messages (role, content)
    ground_truth_column: str | None = "ground_truth"  # null: the data has none
    tools_column: str | None = "tools"  # functions that a chat's assistant may call; null: none
    chat: bool = False  # plain text becomes a user message; messages always use the template
    system_prompt: str | None = None  # put before chat messages that have none
    add_bos: bool = False  # begin with the BOS token, unless the text already does
    max_prompt_length: Count | None = None  # tokens; longer prompts are dropped and counted
    shuffle: bool = True  # training prompts, by seed and epoch
