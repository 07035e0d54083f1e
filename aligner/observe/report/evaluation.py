"""``report.html`` of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aligner.observe.estimates import Z95, Estimate
from aligner.observe.metric_names import describe
from aligner.observe.report.chart import short_number
from aligner.observe.report.page import render
from aligner.observe.samples import Sample

_MEANINGS = (
    ("accuracy", "share of right answers"),
    ("rewards", "mean reward"),
    ("mean@", "share of right answers among k responses"),
    ("pass@", "probability that one of k responses is right (Chen et al. 2021)"),
    ("maj@", "how right the most frequent final answer of k responses is"),
)


@dataclass(frozen=True)
class EvaluatedSet:
    """Results on a set of prompts, as the page shows them."""

    prompts: int
    samples_per_prompt: int
    estimates: Mapping[str, Estimate]
    metrics: Mapping[str, float]
    samples: Sequence[Sample]


def shown_name(name: str) -> str:
    """``pass@4`` of the metric ``pass_at_4``."""
    return name.replace("_at_", "@")


def render_evaluation(
    model: str, sets: Mapping[str, EvaluatedSet], *, config: str, environment: Mapping[str, str]
) -> str:
    """The document."""
    prompts = sum(one.prompts for one in sets.values())
    count = sum(one.prompts * one.samples_per_prompt for one in sets.values())
    return render(
        "evaluation.html",
        title=f"Evaluation of {model}",
        lead=f"{count} answers to {prompts} prompts.",
        sets=[_shown(name, one) for name, one in sets.items()],
        config=config,
        environment=environment,
    )


class _ShownEstimate(NamedTuple):
    name: str
    meaning: str
    share: float | None  # 0 to 1, of the bar; None: no bar
    shown: str


class _ShownSet(NamedTuple):
    name: str
    lead: str
    estimates: Sequence[_ShownEstimate]
    metrics: Mapping[str, str]
    samples: Sequence[Sample]


def _shown(name: str, one: EvaluatedSet) -> _ShownSet:
    return _ShownSet(
        name,
        f"{one.prompts} prompts, {one.samples_per_prompt} responses to each. ±: standard error "
        "over prompts. In brackets: 95 % confidence interval by it.",
        [_estimate(key, estimate) for key, estimate in one.estimates.items()],
        {key: f"{short_number(value)}  ({_meaning(key)})" for key, value in one.metrics.items()},
        one.samples,
    )


def _meaning(name: str) -> str:
    info = describe(f"val_rollouts/{name}")
    return "" if info is None else info.meaning


def _estimate(key: str, one: Estimate) -> _ShownEstimate:
    name = shown_name(key)
    meaning = next((text for start, text in _MEANINGS if name.startswith(start)), "")
    shown = short_number(one.value, 3)
    if one.error is not None:
        low, high = one.value - Z95 * one.error, one.value + Z95 * one.error
        shown += f" ± {short_number(one.error, 2)} [{low:.3f}, {high:.3f}]"
    share = None if key == "rewards" else min(max(one.value, 0.0), 1.0)
    return _ShownEstimate(name, meaning, share, shown)
