"""Worked examples, and a loop over them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import StrictStr

from aligner.config.algorithms.trainer import SupervisedLoopConfig, TrainingConfig
from aligner.config.data import SEPARATE_RESPONSE, PromptColumns, TrainingSets
from aligner.config.fields import Count


@dataclass(frozen=True)
class ExampleDataConfig(PromptColumns, TrainingSets):
    """Training and validation examples, and how a row becomes one."""

    response_column: Annotated[StrictStr, SEPARATE_RESPONSE] = "response"
    """Column of text, of the assistant's message, or of a whole chat."""

    messages_column: StrictStr | None = None
    """Column of a whole chat that the assistant ends, instead of these two; null: none."""

    learn: Literal["last", "all"] = "all"
    """Assistant messages of a chat that are learned: `all` or `last`."""

    max_length: Count | None = None
    """Tokens of an example; longer ones are dropped and counted; null: none are.

    Never cut.
    """


@dataclass(frozen=True)
class SFTTrainerConfig(TrainingConfig):
    """The trainer of a supervised run."""

    sft: SupervisedLoopConfig = field(default_factory=SupervisedLoopConfig)
