"""One page that compares the models of several runs by the same held-out problems."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.observe.estimates import wilson_interval
from aligner.observe.report.chart import (
    Change,
    ChartCard,
    bars,
    collect_series,
    drawn,
    lines_of,
)
from aligner.observe.report.page import render
from aligner.observe.samples import Sample

_MOST_PROMPTS = 12
_HELD_OUT = "held out"  # label of the lines
_SHARES = (0.0, 1.0)  # what every axis of shares shows

# What is drawn of a run: metric after its group, heading, values that every axis shows.
_CURVES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("accuracy", "accuracy", _SHARES),
    ("rewards", "reward", ()),
    ("rewards_margin", "margin", ()),
    ("loss", "loss", ()),
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
    def change(self) -> Change | None:
        """Difference of ``after`` and ``before``, where there is one."""
        return None if self.before is None else Change.between(self.before, self.after, self.better)

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
    policies, runs = comparison.policies, comparison.learned
    minutes = sum(run.seconds for run in runs) / 60
    lead = f"{len(runs)} training runs, {minutes:.1f} minutes of training."
    if comparison.missing:
        lead += f" {comparison.missing} runs are still to be made; the same command goes on."
    # Prompts that all policies were shown answering.
    answers = [{sample.prompt: sample for sample in one.samples} for one in policies]
    shared = [p for p in (answers or [{}])[0] if all(p in each for each in answers)]
    commands: dict[str, str] = {}
    for run in runs:
        commands[run.name] = run.command
        commands |= {f"{run.name}: {name}": path for name, path in run.files.items()}
    counts = " or ".join(map(str, sorted({one.count for one in policies})))
    return render(
        "comparison.html",
        title=comparison.title,
        lead=lead,
        asked=comparison.asked,
        policies_lead=f"Sampled answers to each of {counts} prompts that no run learned from, and "
        "whether it is right. In brackets: 95 % confidence interval.",
        policies=list(zip(policies, _changes(policies), strict=True)),
        names=[one.name for one in policies],
        shared_answers=[[each[prompt] for each in answers] for prompt in shared[:_MOST_PROMPTS]],
        runs=runs,
        curves=drawn(card for run in runs for card in _curves(run)),
        times=bars([(run.name, run.seconds) for run in runs]),
        commands=commands,
        environment=comparison.environment,
    )


def _changes(policies: Sequence[Policy]) -> Iterator[Change | None]:
    """Difference of each policy's accuracy and that of the policy it was made from."""
    known = {one.name: one for one in policies}
    for one in policies:
        parent = known.get(one.began_with or "")
        yield None if parent is None else Change.between(parent.accuracy, one.accuracy, 1)


def _curves(run: Learned) -> Iterator[ChartCard]:
    """Metrics that were measured on held-out data."""
    series = collect_series(run.metrics)
    counted, rewarded = (series.get(f"val_rollouts/{n}") for n in ("accuracy", "rewards"))
    is_same = counted is not None and rewarded is not None and counted == rewarded
    for metric, heading, shows in _CURVES:
        lines = lines_of(series, metric, _HELD_OUT)
        if any(line.label == _HELD_OUT for line in lines) and not (metric == "rewards" and is_same):
            title = f"{run.name}: {heading}"
            yield ChartCard(title, "", title, lines, shows)
