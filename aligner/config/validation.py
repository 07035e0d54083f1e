"""Sampling of answers to held-out prompts: while a run trains, and by an evaluation."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import StrictBool, StrictFloat

from aligner.config.data import PromptSourceConfig
from aligner.config.fields import Count, Function, Natural, Positive
from aligner.config.roles.sampling import (
    LengthParams,
    RolloutConfig,
    SamplingOptions,
    SamplingParams,
)

FINAL_ANSWER = "aligner.rewards.answers:final_answer"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ValidationConfig:
    """Sampling of the responses to a run's validation prompts. null: as in training's rollouts."""

    samples_per_prompt: Count = 1
    """Responses to each prompt.

    Above 1, `mean_at_n`, `pass_at_k` and `maj_at_k` are measured, each with its standard error over
    prompts.
    """

    temperature: Positive | None = None
    """Temperature of these responses only. `null` means as in training's rollouts."""

    top_k: Natural | None = None
    """Draw among the so many likeliest tokens. `0` means off.

    `null` means as in training's rollouts.
    """

    top_p: Annotated[StrictFloat, Interval(gt=0, le=1)] | None = None
    """Draw among the likeliest tokens with this probability. `1` means off.

    `null` means as in training.
    """

    use_greedy: StrictBool | None = None
    """Always take the likeliest token. `null` means as in training's rollouts."""

    max_length: Count | None = None
    """Most new tokens. `null` means as in training's rollouts."""

    final_answer: Function = FINAL_ANSWER
    """Function that finds a response's final answer.

    It is given the text and returns None where there is no answer; `maj_at_k` compares the answers.
    """

    sets: Mapping[str, PromptSourceConfig] = field(default_factory=dict)
    """Further sets of prompts, `NAME: {source, arguments, limit}`.

    On the command line `validation.sets.NAME.source=...`. Their metrics are `val_sets/NAME/*`.
    """

    def sampling_options(self, rollout: RolloutConfig) -> SamplingOptions | None:
        """Sampling of one response. None means as in ``rollout``."""
        length, sampling = rollout.length_params, rollout.sampling_params
        keys = ("temperature", "top_k", "top_p", "use_greedy")
        given = {key: value for key in keys if (value := getattr(self, key)) is not None}
        own = SamplingOptions(length, dataclasses.replace(sampling, **given))
        if self.max_length is not None:
            least = min(length.min_length, self.max_length)
            own = dataclasses.replace(own, length=LengthParams(self.max_length, least))
        return None if own == SamplingOptions(length, sampling) else own

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse what `answer_problems` names."""
        greedy = self.use_greedy
        if greedy is None:
            greedy = run.model.rollout.sampling_params.use_greedy
        yield from answer_problems(key, self.samples_per_prompt, greedy, f"{key}.sets", self.sets)


@dataclass(frozen=True)
class SampleCount:
    """Number of responses to a prompt."""

    samples_per_prompt: Count = 1
    """Responses to each prompt."""


@dataclass(frozen=True)
class AnswerSamplingConfig(SamplingParams, LengthParams, SampleCount):
    """Sampling of a model that answers without being trained."""

    max_length: Count = 256
    """Most new tokens, the end-of-sequence token included."""

    batch_size: Count = 64
    """Sequences in flight together, per rank."""

    @property
    def sampling_options(self) -> SamplingOptions:
        """The same as the engines have it."""
        names = [one.name for one in dataclasses.fields(SamplingParams)]
        return SamplingOptions(
            LengthParams(max_length=self.max_length, min_length=self.min_length),
            SamplingParams(**{name: getattr(self, name) for name in names}),
        )


def answer_problems(
    key: str, samples_per_prompt: int, greedy: bool, sets_key: str, sets: Mapping[str, Any]
) -> Iterator[str]:
    """Samples of a prompt that would all be equal, and names that cannot be part of a metric's."""
    if greedy and samples_per_prompt > 1:
        yield (
            f"{key}.samples_per_prompt={samples_per_prompt} with use_greedy=true draws the same "
            f"response so many times. Set {key}.samples_per_prompt=1, or {key}.use_greedy=false"
        )
    for name in sets:
        if not _NAME.fullmatch(name):
            yield (f"{sets_key}.{name}: a set's name is made of letters, digits, '_', '.' and '-'")
