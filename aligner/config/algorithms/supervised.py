"""Worked examples, and a loop over them."""

from dataclasses import dataclass, field
from typing import Literal

from aligner.config.algorithms.trainer import SupervisedLoopConfig, TrainingConfig
from aligner.config.data import PromptSourceConfig
from aligner.config.fields import Count


@dataclass(frozen=True)
class ExampleDataConfig:
    """Training and validation examples, and how a row becomes one."""

    train: PromptSourceConfig
    validation: PromptSourceConfig | None = None  # null: no validation
    prompt_column: str = "prompt"  # text, or a list of chat messages (role, content)
    response_column: str = "response"  # text, the assistant's message, or a whole chat
    # A whole chat that ends with the assistant, instead of the two columns above; null: none.
    messages_column: str | None = None
    tools_column: str | None = "tools"  # functions that a chat's assistant may call; null: none
    chat: bool = False  # plain text becomes a user message; messages always use the template
    system_prompt: str | None = None  # put before chat messages that have none
    add_bos: bool = False  # begin with the BOS token, unless the text already does
    learn: Literal["last", "all"] = "all"  # which assistant messages of a chat are learned
    max_length: Count | None = None  # tokens; longer examples are dropped and counted
    shuffle: bool = True  # training examples, by seed and epoch


@dataclass(frozen=True)
class SFTTrainerConfig(TrainingConfig):
    """The trainer of a supervised run."""

    sft: SupervisedLoopConfig = field(default_factory=SupervisedLoopConfig)
