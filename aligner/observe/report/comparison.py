"""One page that compares the models of several runs by the same held-out problems."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from aligner.observe.report.chart import Series, bars, short_number
from aligner.observe.report.intervals import wilson_interval
from aligner.observe.report.page import facts, folded, page, section
from aligner.observe.report.run import chart_card, collect_series, legend_of
from aligner.observe.samples import Sample

_MOST_PROMPTS = 12
_SHARES = (0.0, 1.0)  # what every axis of shares shows

# What is drawn of a run: metric after its group, heading, values that every axis shows.
_CURVES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("accuracy", "accuracy", _SHARES),
    ("rewards", "reward", ()),
    ("rewards_margin", "margin", ()),
    ("loss", "loss", ()),
)
_LINES = (  # group, label, colour
    ("train_rollouts", "training", "a"),
    ("train_optim", "training", "a"),
    ("val_rollouts", "held out", "b"),
    ("val_optim", "held out", "b"),
)


@dataclass(frozen=True)
class Policy:
    """A policy that was asked the held-out problems, one sampled answer to each."""

    name: str
    began_with: str | None  # the policy it was made from; None: it was given
    accuracy: float  # share of right answers
    count: int  # answers
    samples: Sequence[Sample]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of ``accuracy``."""
        return wilson_interval(self.accuracy, self.count)


@dataclass(frozen=True)
class Measure:
    """A number of a run on what it held out, before and after."""

    label: str
    before: float | None  # None: it does not depend on the run
    after: float
    count: int | None = None  # samples of a share; None: no share
    better: int = 1  # 1: more, -1: less

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of a share."""
        return None if self.count is None else wilson_interval(self.after, self.count)


@dataclass(frozen=True)
class Learned:
    """A run that trained a model."""

    name: str
    began_with: str
    metrics: Sequence[Mapping[str, float]]  # lines of metrics.jsonl
    measures: Sequence[Measure]
    seconds: float  # from start to end, loading and saving included
    command: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """Input of the page."""

    title: str
    policies: Sequence[Policy]
    learned: Sequence[Learned]
    environment: Mapping[str, str]
    missing: int = 0  # runs still to be made
    asked: str = "Right answers to the same held-out problems"  # what `policies` compares

    def numbers(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "policies": {
                one.name: {
                    "began_with": one.began_with,
                    "accuracy": one.accuracy,
                    "interval_95": list(one.interval),
                    "count": one.count,
                }
                for one in self.policies
            },
            "runs": {
                run.name: {
                    "began_with": run.began_with,
                    "seconds": round(run.seconds, 1),
                    "held_out": {
                        one.label: {
                            "before": one.before,
                            "after": one.after,
                            "interval_95": one.interval and list(one.interval),
                            "count": one.count,
                        }
                        for one in run.measures
                    },
                }
                for run in self.learned
            },
        }


def render_comparison(comparison: Comparison) -> str:
    """The document."""
    minutes = sum(run.seconds for run in comparison.learned) / 60
    lead = f"{len(comparison.learned)} training runs, {minutes:.1f} minutes of training."
    if comparison.missing:
        lead += f" {comparison.missing} runs are still to be made; the same command goes on."
    sections = [f'<h1>{escape(comparison.title)}</h1><p class="lead">{escape(lead)}</p>']
    if comparison.policies:
        counts = sorted({one.count for one in comparison.policies})
        sections.append(
            section(
                comparison.asked,
                f"Sampled answers to each of {' or '.join(map(str, counts))} prompts that no "
                "run learned from, and whether it is right. In brackets: 95 % confidence interval.",
                _policies(comparison.policies),
            )
        )
    if comparison.learned:
        sections += [
            section(
                "What each run learned",
                "Measured by the run itself on what it held out, before the first step and at the "
                "end. In brackets: 95 % confidence interval.",
                _measures(comparison.learned),
            ),
            section("Learning curves", "Over the steps of each run.", _curves(comparison.learned)),
        ]
    if comparison.policies:
        sections.append(
            section("The same prompts", "What each model answered.", _answers(comparison.policies))
        )
    if comparison.learned:
        times = [(run.name, run.seconds) for run in comparison.learned]
        sections += [
            section(
                "Times",
                "Seconds from start to end of each training run, loading and saving included.",
                f'<div class="card">{bars(times, "s")}</div>',
            ),
            section("Commands and files", "Each run by itself.", _commands(comparison.learned)),
        ]
    sections.append(folded("Environment", facts(dict(comparison.environment))))
    return page(comparison.title, sections)


def _policies(policies: Sequence[Policy]) -> str:
    known = {one.name: one for one in policies}
    rows = []
    for one in policies:
        parent = known.get(one.began_with or "")
        change = "" if parent is None else _change(parent.accuracy, one.accuracy)
        width = f"width:{100 * one.accuracy:.1f}%"
        bar = f'<td class="bar" style="width:35%"><div style="{width}"></div></td>'
        rows.append(
            f"<tr>{_cell(one.name)}{_cell(one.began_with or '')}{bar}"
            f"{_number(one.accuracy, one.interval)}{change or _cell('')}</tr>"
        )
    return _table(("model", "made from", ""), rows, ("right", "change"))


def _measures(runs: Sequence[Learned]) -> str:
    rows = []
    for run in runs:
        for index, one in enumerate(run.measures):
            named = (run.name, run.began_with) if index == 0 else ("", "")
            before = _cell("") if one.before is None else _number(one.before)
            change = _cell("")
            if one.before is not None:
                change = _change(one.before, one.after, one.better)
            rows.append(
                f"<tr>{''.join(map(_cell, named))}{_cell(one.label)}{before}"
                f"{_number(one.after, one.interval)}{change}</tr>"
            )
    return _table(("run", "began with", "held out"), rows, ("before", "after", "change"))


def _curves(runs: Sequence[Learned]) -> str:
    cards = []
    for run in runs:
        series = collect_series(run.metrics)
        counted, rewarded = (series.get(f"val_rollouts/{n}") for n in ("accuracy", "rewards"))
        is_same = counted is not None and rewarded is not None and counted == rewarded
        for metric, heading, shows in _CURVES:
            if metric == "rewards" and is_same:
                continue
            lines = [
                Series(label, found.steps, found.values, style)
                for group, label, style in _LINES
                if (found := series.get(f"{group}/{metric}")) is not None
            ]
            if any(line.label == "held out" for line in lines):
                title = f"{run.name}: {heading}"
                cards.append(chart_card(title, legend_of(lines), "", title, lines, shows))
    return f'<div class="charts">{"".join(cards)}</div>'


def _answers(policies: Sequence[Policy]) -> str:
    """A row for each prompt that all were shown answering, a column for each policy."""
    answers = [{sample.prompt: sample for sample in one.samples} for one in policies]
    prompts = [prompt for prompt in answers[0] if all(prompt in found for found in answers)]
    rows = []
    for prompt in prompts[:_MOST_PROMPTS]:
        given = [found[prompt] for found in answers]
        cells = "".join(
            f'<td class="text"><span class="{"up" if sample.reward > 0 else "down"}">'
            f"{escape(sample.response.rstrip())}</span></td>"
            for sample in given
        )
        rows.append(f"<tr>{_cell(prompt)}{_cell(given[0].ground_truth or '')}{cells}</tr>")
    return _table(("prompt", "right", *(one.name for one in policies)), rows)


def _commands(runs: Sequence[Learned]) -> str:
    rows: dict[str, str] = {}
    for run in runs:
        rows[run.name] = run.command
        rows |= {f"{run.name}: {name}": path for name, path in run.files.items()}
    return facts(rows)


def _table(head: Sequence[str], rows: Sequence[str], numbers: Sequence[str] = ()) -> str:
    """``head``: of the columns of text; ``numbers``: of those of numbers behind them."""
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    columns += "".join(f'<th class="number">{escape(name)}</th>' for name in numbers)
    return (
        f'<div class="card scroll"><table class="samples"><tr>{columns}</tr>{"".join(rows)}'
        "</table></div>"
    )


def _cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>'


def _number(value: float, interval: tuple[float, float] | None = None) -> str:
    shown = short_number(value, 3)
    if interval is not None:
        shown += f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f'<td class="number">{shown}</td>'


def _change(before: float, after: float, better: int = 1) -> str:
    change = after - before
    if not math.isfinite(change) or not change:
        return '<td class="number">±0</td>'
    mood = "up" if change * better > 0 else "down"
    sign = "+" if change > 0 else "−"
    return f'<td class="number {mood}">{sign}{short_number(abs(change), 3)}</td>'
