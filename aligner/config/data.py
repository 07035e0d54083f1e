"""Where prompts come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.config.fields import Count


@dataclass(frozen=True)
class PromptSourceConfig:
    """One set of prompts: files, or a Python generator. Exactly one of the two."""

    files: str | tuple[str, ...] | None = None  # .jsonl or .parquet; globs allowed
    generator: str | None = None  # dotted path or file.py:function yielding rows (dicts)
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the generator
    limit: Count | None = None  # at most so many rows; null: all


@dataclass(frozen=True)
class DataConfig:
    """Training and validation prompts, and how a row is read."""

    train: PromptSourceConfig
    validation: PromptSourceConfig | None = None  # null: no validation
    prompt_column: str = "prompt"  # text, or a list of chat messages (role, content)
    ground_truth_column: str | None = "ground_truth"  # null: the data has none
    apply_chat_template: bool = False  # wrap plain-text prompts as one user message
    max_prompt_length: Count | None = None  # tokens; longer prompts are dropped and counted
    shuffle: bool = True  # training prompts, by seed and epoch
