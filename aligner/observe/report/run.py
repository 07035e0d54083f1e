"""``report.html``: what a run did, in one file that opens from disk."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

from aligner.checkpoint.durable import atomic_file
from aligner.observe.metric_names import describe
from aligner.observe.metrics import read_metrics
from aligner.observe.report.chart import Series, bars, line_chart, short_number
from aligner.observe.report.page import facts, folded, page, section
from aligner.observe.report.samples import samples_section
from aligner.observe.samples import Sample, read_samples


@dataclass(frozen=True)
class RunRecord:
    """Input of the report."""

    title: str
    metrics: Sequence[Mapping[str, float]]  # lines of metrics.jsonl, each with ``step``
    samples: Sequence[Sample]
    config: str  # the resolved configuration as YAML
    environment: Mapping[str, str]  # versions, machine, command
    artifacts: Mapping[str, str] = field(default_factory=dict)  # what the run left: name → path
    status: str = ""  # one sentence: how the run ended


class _Headline(NamedTuple):
    metric: str
    label: str
    better: int  # 1: more, -1: less, 0: neither


_HEADLINES = (
    _Headline("val_rollouts/accuracy", "Validation accuracy", 1),
    _Headline("val_rollouts/rewards", "Validation reward", 1),
    _Headline("train_rollouts/rewards", "Training reward", 1),
    _Headline("val_optim/accuracy", "Validation accuracy", 1),
    _Headline("val_optim/loss", "Validation loss", -1),
    _Headline("train_rollouts/init_policy_kl", "KL to the initial policy", 0),
    _Headline("train_rollouts/generation_length", "Response length (tokens)", 0),
)

_LOSS = "loss"  # a chart of supervised runs: in others it means little, and they do not validate it

# Charts at the top: metric after its group, heading, what to look for.
_OVERVIEW = (
    ("accuracy", "Accuracy", "Share of right answers. Should rise."),
    (_LOSS, "Loss", "Falls on examples it has not seen, as long as there is something to learn."),
    ("rewards", "Reward", "What the reward function gives. Should rise."),
    (
        "init_policy_kl",
        "KL to the initial policy",
        "How far the policy has moved. Rises slowly in a healthy run; a jump is a warning.",
    ),
    (
        "generation_length",
        "Response length",
        "Tokens per response. Watch for collapse, or for growth without reward.",
    ),
    (
        "fraction_of_samples_properly_ended",
        "Properly ended",
        "Share of responses that ended by themselves. Near 1 is healthy.",
    ),
    (
        "entropy",
        "Entropy",
        "How undecided the policy is about the next token. At 0 it explores nothing.",
    ),
)
_LINES = (  # group, label, colour
    ("train_rollouts", "training", "a"),
    ("train_optim", "training", "a"),
    ("val_rollouts", "validation", "b"),
    ("val_optim", "validation", "b"),
)

_GROUPS = {
    "val_rollouts": "Validation",
    "val_sets": "Validation, further sets",
    "val_optim": "Validation",
    "train_rollouts": "Training rollouts",
    "train_data": "Training data",
    "train_optim": "Optimisation",
    "critic": "Critic",
    "sampler": "Sampler against trainer",
    "progress": "Progress",
    "custom": "Custom",
    "timers": "Times (seconds)",
}


def write_report(
    folder: Path,
    *,
    title: str,
    config: str,
    environment: Mapping[str, str],
    artifacts: Mapping[str, str] | None = None,
    status: str = "",
) -> Path:
    """Make ``<folder>/report.html`` from the ``metrics.jsonl`` and ``samples.jsonl`` there."""
    record = RunRecord(
        title=title,
        metrics=read_metrics(folder / "metrics.jsonl"),
        samples=read_samples(folder / "samples.jsonl"),
        config=config,
        environment=environment,
        artifacts=artifacts or {},
        status=status,
    )
    path = folder / "report.html"
    with atomic_file(path) as file:
        file.write(render_report(record).encode())
    return path


def render_report(run: RunRecord) -> str:
    """The document."""
    series = collect_series(run.metrics)
    last = max((int(line["step"]) for line in run.metrics), default=0)
    lead = f"{last:,} steps. {run.status}".strip()
    sections = [f'<h1>{escape(run.title)}</h1><p class="lead">{escape(lead)}</p>']
    if series:
        sections += [
            _tiles(series),
            section(
                "Is it learning?",
                f"{_what_a_step_does(series)} Point at a curve to read its numbers.",
                _overview(series),
            ),
        ]
    sections += [samples_section(run.samples)]
    if series:
        sections += [
            _times(series),
            section(
                "All metrics",
                "Every number the run recorded. Hover over a name for its denominator.",
                _all_metrics(series),
            ),
        ]
    if run.artifacts:
        sections.append(section("Files", "What the run left behind.", facts(dict(run.artifacts))))
    sections += [
        folded("Configuration", f'<pre class="card">{escape(run.config)}</pre>'),
        folded("Environment", facts(dict(run.environment))),
    ]
    return page(run.title, sections)


def _what_a_step_does(series: Mapping[str, Series]) -> str:
    if any(name.startswith(("train_rollouts/", "val_rollouts/")) for name in series):
        return "Each step the model answers prompts, is rewarded, and is changed a little."
    return "Each step the model is changed a little, by what a batch of examples tells."


def collect_series(metrics: Sequence[Mapping[str, float]]) -> dict[str, Series]:
    """Steps and values of each metric, in order of first appearance."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for line in metrics:
        for name, value in line.items():
            if name != "step":
                steps, values = found.setdefault(name, ([], []))
                steps.append(int(line["step"]))
                values.append(float(value))
    return {name: Series("", steps, values) for name, (steps, values) in found.items()}


def _tiles(series: Mapping[str, Series]) -> str:
    tiles = [_tile(series[h.metric], h, series) for h in _HEADLINES if h.metric in series]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(series: Series, headline: _Headline, everything: Mapping[str, Series]) -> str:
    first, last = series.values[0], series.values[-1]
    change = last - first
    mood = ""
    if headline.better and math.isfinite(change) and change:
        mood = " up" if change * headline.better > 0 else " down"
    note = f"step {series.steps[0]} → {series.steps[-1]}"
    error = _standard_error(headline.metric, last, everything)
    if error is not None:
        note += f", standard error {short_number(error)}"
    shown = "±0" if not change else f"{'+' if change > 0 else '−'}{short_number(abs(change), 3)}"
    return (
        f'<div class="card tile"><div class="name">{escape(headline.label)}</div>'
        f'<div class="value">{_beside(first, last)} → {_beside(last, first)}</div>'
        f'<div class="note"><b class="{mood.strip()}">{shown}</b> · {note}</div></div>'
    )


def _beside(value: float, other: float) -> str:
    """``value`` as its neighbour is shown: what is nothing beside it is 0."""
    is_nothing = math.isfinite(other) and abs(value) < 5e-4 * abs(other)
    return short_number(0.0 if is_nothing else value, 3)


def _standard_error(metric: str, value: float, series: Mapping[str, Series]) -> float | None:
    """Standard error of a share measured on the samples of one validation."""
    count = series.get("val_rollouts/num_samples")
    if metric != "val_rollouts/accuracy" or count is None or not 0 <= value <= 1:
        return None
    return round(math.sqrt(value * (1 - value) / max(count.values[-1], 1)), 3)


def _overview(series: Mapping[str, Series]) -> str:
    cards = []
    for name, heading, lead in _OVERVIEW:
        if name == _LOSS and f"val_optim/{_LOSS}" not in series:
            continue
        lines = [
            Series(label, one.steps, one.values, style)
            for group, label, style in _LINES
            if (one := series.get(f"{group}/{name}")) is not None
        ]
        if name == "accuracy" and "val_rollouts/accuracy" not in series:
            info = describe("val_optim/accuracy")
            lead = f"{info.meaning} Should rise." if info else lead
        cards.append(chart_card(heading, legend_of(lines), lead, lead, lines))
    return f'<div class="charts">{"".join(cards)}</div>'


def _all_metrics(series: Mapping[str, Series]) -> str:
    parts = []
    for group, heading in _GROUPS.items():
        members = {n: s for n, s in series.items() if n.split("/", 1)[0] == group}
        cards = "".join(_metric_card(name, one) for name, one in sorted(members.items()))
        if cards:
            is_open = group != "timers"
            body = f'<div class="charts">{cards}</div>'
            parts.append(folded(f"{heading}: {group}/", body, is_open=is_open))
    return "".join(parts)


def _metric_card(name: str, series: Series) -> str:
    info = describe(name)
    meaning, over = (info.meaning, info.over) if info else ("", "")
    latest = f"<span>{short_number(series.values[-1])}</span>"
    heading = name.split("/", 1)[1]
    return chart_card(heading, latest, meaning, f"{name}: {meaning} Over: {over}", [series])


def legend_of(lines: Sequence[Series]) -> str:
    """Legend of the colours of the lines, as HTML."""
    names = "".join(f'<i class="{one.style}"></i>{escape(one.label)}' for one in lines)
    return f'<span class="legend">{names}</span>'


def chart_card(
    heading: str,
    aside: str,
    lead: str,
    tooltip: str,
    lines: Sequence[Series],
    shows: Sequence[float] = (),
) -> str:
    """A chart with what is said of it; ``aside`` is HTML. Empty text where nothing is drawn."""
    chart = line_chart(lines, shows)
    if not chart:
        return ""
    return (
        f'<div class="card" title="{escape(tooltip, quote=True)}"><h3><b>{escape(heading)}</b>'
        f"{aside}</h3><p>{escape(lead)}</p>{chart}</div>"
    )


def _times(series: Mapping[str, Series]) -> str:
    phases = [
        (name.removeprefix("timers/").replace("_", " "), sum(one.values))
        for name, one in series.items()
        if name.startswith("timers/") and name != "timers/total" and "per_second" not in name
    ]
    if not phases:
        return ""
    body = f'<div class="card">{bars(phases, "s")}</div>'
    return section("Where the time went", "Seconds of each phase over the whole run.", body)
