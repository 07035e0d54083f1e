"""Sampling of answers to held-out prompts, in the validations of a run and in an evaluation."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
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
    """Sampling options for validation prompts. None means the value of the rollouts' option."""

    samples_per_prompt: Count = 1
    """Responses to each prompt. Above 1, `mean_at_n`, `pass_at_k` and `maj_at_k` are measured, each
    with its standard error over prompts."""

    temperature: Positive | None = None
    """Temperature of validation responses. `null` means as in rollouts."""

    top_k: Natural | None = None
    """Sample among this number of most probable tokens. `0` means all, `null` as in rollouts."""

    top_p: Annotated[StrictFloat, Interval(gt=0, le=1)] | None = None
    """Sample among the fewest tokens whose total probability reaches this value. `1` means all
    tokens, `null` as in rollouts."""

    use_greedy: StrictBool | None = None
    """Always select the most probable token. `null` means as in rollouts."""

    max_length: Count | None = None
    """Maximum number of new tokens. `null` means as in rollouts."""

    final_answer: Function = FINAL_ANSWER
    """Function that extracts the answer of a response for `maj_at_k`, or returns None."""

    sets: Mapping[str, PromptSourceConfig] = field(default_factory=dict)
    """Additional sets of prompts, `NAME: {source, arguments, limit}`. On the command line
    `validation.sets.NAME.source=...`. Their metrics are `val_sets/NAME/*`."""

    def sampling_options(self, rollout: RolloutConfig) -> SamplingOptions | None:
        """Return length limits and sampling options, or None if they equal those in ``rollout``."""
        keys = ("temperature", "top_k", "top_p", "use_greedy")
        changes = {key: value for key in keys if (value := getattr(self, key)) is not None}
        length, sampling = rollout.length_params, replace(rollout.sampling_params, **changes)
        if self.max_length is not None:
            length = LengthParams(self.max_length, min(length.min_length, self.max_length))
        options = SamplingOptions(length, sampling)
        is_same = options == SamplingOptions(rollout.length_params, rollout.sampling_params)
        return None if is_same else options

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield the error messages of `answer_problems`."""
        greedy = self.use_greedy
        if greedy is None:
            greedy = run.model.rollout.sampling_params.use_greedy
        yield from answer_problems(key, self.samples_per_prompt, greedy, f"{key}.sets", self.sets)


@dataclass(frozen=True)
class AnswerSamplingConfig(SamplingParams, LengthParams):
    """Sampling options of commands that do not train."""

    samples_per_prompt: Count = 1
    """Responses to each prompt."""

    max_length: Count = 256
    """Maximum number of new tokens, the end-of-sequence token included."""

    batch_size: Count = 64
    """Sequences that are generated at the same time, per rank."""

    @property
    def sampling_options(self) -> SamplingOptions:
        """Length limits and sampling options in the form that engines accept."""
        return SamplingOptions(
            LengthParams(max_length=self.max_length, min_length=self.min_length),
            SamplingParams(**{key.name: getattr(self, key.name) for key in fields(SamplingParams)}),
        )


def answer_problems(
    key: str, samples_per_prompt: int, greedy: bool, sets_key: str, sets: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a message for several greedy samples of a prompt, and for each invalid set name.

    ``key`` and ``sets_key``: dotted keys of the section with ``greedy`` and of ``sets``.
    """
    if greedy and samples_per_prompt > 1:
        yield (
            f"{key}.samples_per_prompt={samples_per_prompt} with use_greedy=true samples identical "
            f"responses. Set {key}.samples_per_prompt=1, or {key}.use_greedy=false"
        )
    for name in sets:
        if not _NAME.fullmatch(name):
            yield f"{sets_key}.{name}: a set's name has letters, digits, '_', '.', '-'. Rename it"
