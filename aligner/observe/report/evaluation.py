"""``report.html`` of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from aligner.observe.estimates import Estimate
from aligner.observe.metric_names import describe
from aligner.observe.report.chart import short_number
from aligner.observe.report.page import facts, folded, page, section
from aligner.observe.report.samples import plain_table
from aligner.observe.samples import Sample

_Z95 = 1.959963984540054  # the normal distribution holds 95 % within this many deviations
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
    count = sum(one.prompts * one.samples_per_prompt for one in sets.values())
    lead = f"{count} answers to {sum(one.prompts for one in sets.values())} prompts."
    sections = [f'<h1>Evaluation of {escape(model)}</h1><p class="lead">{escape(lead)}</p>']
    for name, one in sets.items():
        sections.append(
            section(
                name,
                f"{one.prompts} prompts, {one.samples_per_prompt} responses to each. ±: standard "
                "error over prompts. In brackets: 95 % confidence interval by it.",
                _estimates(one.estimates),
            )
        )
        rows = {key: short_number(value) for key, value in one.metrics.items()}
        known = {key: f"{value}  ({_meaning(key)})" for key, value in rows.items()}
        sections.append(folded("All metrics", facts(known)))
        sections.append(folded("Answers", plain_table(one.samples), is_open=True))
    sections += [
        folded("Configuration", f'<pre class="card">{escape(config)}</pre>'),
        folded("Environment", facts(dict(environment))),
    ]
    return page(f"Evaluation of {model}", sections)


def _meaning(name: str) -> str:
    info = describe(f"val_rollouts/{name}")
    return "" if info is None else info.meaning


def _estimates(estimates: Mapping[str, Estimate]) -> str:
    rows = []
    for key, one in estimates.items():
        name = shown_name(key)
        meaning = next((text for start, text in _MEANINGS if name.startswith(start)), "")
        shown = short_number(one.value, 3)
        if one.error is not None:
            low, high = one.value - _Z95 * one.error, one.value + _Z95 * one.error
            shown += f" ± {short_number(one.error, 2)} [{low:.3f}, {high:.3f}]"
        width = f"width:{100 * min(max(one.value, 0.0), 1.0):.1f}%"
        bar = "" if key == "rewards" else f'<div style="{width}"></div>'
        rows.append(
            f'<tr><td class="text">{escape(name)}</td><td class="text">{escape(meaning)}</td>'
            f'<td class="bar" style="width:35%">{bar}</td><td class="number">{shown}</td></tr>'
        )
    return f'<div class="card scroll"><table class="samples">{"".join(rows)}</table></div>'
