"""The HTML report of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aligner.observe.estimates import Z95, Estimate
from aligner.observe.metrics import Sample, describe
from aligner.observe.report.chart import short_number
from aligner.observe.report.page import render

_MEANINGS = (
    ("accuracy", "share of right answers"),
    ("rewards", "mean reward"),
    ("mean@", "share of right answers among k responses"),
    ("pass@", "probability that one of k responses is right (Chen et al. 2021)"),
    ("maj@", "how right the most frequent final answer of k responses is"),
)


@dataclass(frozen=True)
class EvaluatedSet:
    """Results of a model on one set of prompts."""

    prompts: int
    samples_per_prompt: int
    estimates: Mapping[str, Estimate]
    metrics: Mapping[str, float]
    samples: Sequence[Sample]


def shown_name(name: str) -> str:
    """Return a metric's name as shown in reports, such as ``pass@4`` for ``pass_at_4``."""
    return name.replace("_at_", "@")


def render_evaluation(
    model: str, sets: Mapping[str, EvaluatedSet], *, config: str, environment: Mapping[str, str]
) -> str:
    """Return the HTML report of an evaluation. ``sets``: results by set. ``config``: YAML text."""
    prompts = sum(results.prompts for results in sets.values())
    answers = sum(results.prompts * results.samples_per_prompt for results in sets.values())
    return render(
        "evaluation.html",
        title=f"Evaluation of {model}",
        lead=f"{answers} answers to {prompts} prompts.",
        sets=[
            (
                name,
                results,
                [_estimate_row(*item) for item in results.estimates.items()],
                {name: _explained(name, value) for name, value in results.metrics.items()},
            )
            for name, results in sets.items()
        ],
        config=config,
        environment=environment,
    )


def _explained(name: str, value: float) -> str:
    info = describe(f"val_rollouts/{name}")
    return f"{short_number(value)}  ({info.meaning if info else ''})"


def _estimate_row(key: str, estimate: Estimate) -> tuple[str, str, float | None, str]:
    """Return a table row: (name, meaning, bar length from 0 to 1 or None, value as text)."""
    name = shown_name(key)
    meaning = next((text for start, text in _MEANINGS if name.startswith(start)), "")
    text = short_number(estimate.value, 3)
    if estimate.error is not None:
        low, high = (estimate.value + sign * Z95 * estimate.error for sign in (-1, 1))
        text += f" ± {short_number(estimate.error, 2)} [{low:.3f}, {high:.3f}]"
    share = None if key == "rewards" else min(max(estimate.value, 0.0), 1.0)
    return name, meaning, share, text
