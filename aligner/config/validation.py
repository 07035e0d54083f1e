"""Sampling of answers to held-out prompts: while a run trains, and by an evaluation."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from aligner.config.data import PromptSourceConfig
from aligner.config.fields import Count, Function, Natural, Positive, Range
from aligner.config.roles.model import Drawing, LengthParams, RolloutConfig, SamplingParams
from aligner.errors import ConfigError

FINAL_ANSWER = "aligner.rewards.answers:final_answer"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ValidationConfig:
    """Sampling of the responses to a run's validation prompts. null: as in training's rollouts."""

    samples_per_prompt: Count = 1  # above 1: mean@k, pass@k and maj@k are measured, too
    temperature: Positive | None = None
    top_k: Natural | None = None  # 0: off
    top_p: Annotated[float, Range(low=0.0, high=1.0, exclusive=True)] | None = None  # 1: off
    use_greedy: bool | None = None  # always the likeliest token
    max_length: Count | None = None  # most new tokens
    # What answers of maj@k are compared by: a function from a response's text to its final answer,
    # or null where there is none.
    final_answer: Function = FINAL_ANSWER
    # Further sets of prompts by name, each with source, arguments and limit: val_sets/NAME/*.
    sets: Mapping[str, PromptSourceConfig] = field(default_factory=dict)

    def drawing(self, rollout: RolloutConfig) -> Drawing | None:
        """Sampling of one response; None: as in ``rollout``."""
        length, sampling = rollout.length_params, rollout.sampling_params
        keys = ("temperature", "top_k", "top_p", "use_greedy")
        given = {key: value for key in keys if (value := getattr(self, key)) is not None}
        own = Drawing(length, dataclasses.replace(sampling, **given))
        if self.max_length is not None:
            least = min(length.min_length, self.max_length)
            own = dataclasses.replace(own, length=LengthParams(self.max_length, least))
        return None if own == Drawing(length, sampling) else own


@dataclass(frozen=True)
class AnswerSamplingConfig:
    """Sampling of a model that answers without being trained."""

    samples_per_prompt: Count = 1  # responses to each prompt
    max_length: Count = 256  # most new tokens
    min_length: Natural = 1  # a response cannot end before so many tokens
    temperature: Positive = 1.0
    top_k: Natural = 0  # 0: off
    top_p: Annotated[float, Range(low=0.0, high=1.0, exclusive=True)] = 1.0  # 1: off
    repetition_penalty: Positive = 1.0  # 1: off
    use_greedy: bool = False  # always the likeliest token
    end_strings: tuple[str, ...] = ()  # a response ends after the first of these
    end_tokens: tuple[str, ...] = ()  # further tokens that end it, beside the model's own
    batch_size: Count = 64  # sequences in flight together, per rank

    @property
    def drawing(self) -> Drawing:
        """The same as the engines have it."""
        names = [one.name for one in dataclasses.fields(SamplingParams)]
        return Drawing(
            LengthParams(max_length=self.max_length, min_length=self.min_length),
            SamplingParams(**{name: getattr(self, name) for name in names}),
        )


def check_samples_differ(key: str, samples_per_prompt: int, greedy: bool) -> None:
    """Refuse several samples of a prompt that would all be the same."""
    if greedy and samples_per_prompt > 1:
        raise ConfigError(
            f"{key}.samples_per_prompt={samples_per_prompt} with use_greedy=true draws the same "
            f"response so many times; set {key}.samples_per_prompt=1, or {key}.use_greedy=false"
        )


def check_sets(key: str, sets: Mapping[str, PromptSourceConfig]) -> None:
    """Refuse names that cannot be part of a metric's."""
    for name in sets:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{key}.{name}: a set's name is made of letters, digits, '_', '.' and '-'"
            )
