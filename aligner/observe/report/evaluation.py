"""``report.html`` of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        sets=[
            (name, one, [_estimate(*item) for item in one.estimates.items()], _metrics(one.metrics))
            for name, one in sets.items()
        ],
        config=config,
        environment=environment,
    )


def _metrics(values: Mapping[str, float]) -> dict[str, str]:
    """Numbers of one set, each with its meaning, by the names of the metrics."""
    known = {key: describe(f"val_rollouts/{key}") for key in values}
    return {
        key: f"{short_number(values[key])}  ({info.meaning if info else ''})"
        for key, info in known.items()
    }


def _estimate(key: str, one: Estimate) -> tuple[str, str, float | None, str]:
    """Name, meaning, share of the bar from 0 to 1 (None: no bar) and text of an estimate."""
    name = shown_name(key)
    meaning = next((text for start, text in _MEANINGS if name.startswith(start)), "")
    shown = short_number(one.value, 3)
    if one.error is not None:
        low, high = one.value - Z95 * one.error, one.value + Z95 * one.error
        shown += f" ± {short_number(one.error, 2)} [{low:.3f}, {high:.3f}]"
    share = None if key == "rewards" else min(max(one.value, 0.0), 1.0)
    return name, meaning, share, shown
