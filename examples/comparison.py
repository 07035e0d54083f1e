"""Runs of any kind side by side: for directories of one's own, and for the stages of a pipeline."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aligner.checkpoint.durable import atomic_file, write_json
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.device import accelerator
from aligner.errors import AlignerError, DataError
from aligner.observe.estimates import Z95
from aligner.observe.metrics import read_metrics
from aligner.observe.report.chart import (
    Change,
    ChartCard,
    bars,
    collect_series,
    drawn,
    lines_of,
    short_number,
)
from aligner.observe.report.page import render
from aligner.observe.samples import Sample
from aligner.packages import describe_environment

_METRICS, _EVALUATION = "metrics.jsonl", "evaluation.json"
_REWARD = "val_rollouts/rewards"
# Metric of a validation, what it is called here, and whether more (1) or less (-1) is better.
_MEASURES = (
    ("val_rollouts/accuracy", "right answers", 1),
    (_REWARD, "reward", 1),
    ("val_optim/accuracy", "pairs ranked right", 1),
    ("val_optim/rewards_margin", "margin", 1),
    ("val_optim/loss", "loss", -1),
)
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


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of a share of ``count`` independent answers (Wilson, 1927).

    Unlike the normal approximation it stays within 0 and 1 and has a width where ``share`` is
    either.
    """
    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share of {share} of {count} answers")
    squared = Z95**2 / count
    middle = (share + squared / 2) / (1 + squared)
    half = Z95 * math.sqrt(share * (1 - share) / count + squared / count / 4) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class ComparedPolicy:
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
    policies: Sequence[ComparedPolicy]
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


def compare_runs(folders: Sequence[Path], output: Path, title: str) -> Path:
    """Write ``report.html`` and ``comparison.json`` to ``output``; returns the report.

    ``folders``: directories of training runs (with ``metrics.jsonl``) and of evaluations (with
    ``evaluation.json``), which are only read.

    Raises:
        DataError: a directory is neither.
    """
    learned: list[Learned] = []
    policies: list[ComparedPolicy] = []
    for folder, name in zip(folders, _names(folders), strict=True):
        if (folder / _EVALUATION).is_file():
            policies += _evaluated(folder, name)
        elif (folder / _METRICS).is_file():
            learned.append(_run(folder, name))
        else:
            raise DataError(
                f"{folder} holds neither {_METRICS} (a training run) nor {_EVALUATION} (an "
                "evaluation). Give directories that a run wrote"
            )
    comparison = Comparison(
        title=title,
        policies=policies,
        learned=learned,
        environment=describe_environment(accelerator.description()),
        asked="The answers of each evaluation, and the share of right ones",
    )
    report = output / "report.html"
    save_comparison(report, comparison)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(comparison))
    console.print(f"report  {report}")
    return report


def _names(folders: Sequence[Path]) -> list[str]:
    """The directories' own names, as much of their paths as distinguishes them."""
    resolved = [folder.expanduser().resolve() for folder in folders]
    counts = Counter(folder.name for folder in resolved)
    return [
        folder.name if counts[folder.name] == 1 else str(given)
        for folder, given in zip(resolved, folders, strict=True)
    ]


def _run(folder: Path, name: str) -> Learned:
    metrics = read_metrics(folder / _METRICS)
    if not metrics:
        raise DataError(f"{folder / _METRICS} has no complete line; the run has not made a step")
    model = _config(folder).get("model", {})
    files = {
        kind: str(folder / file)
        for kind, file in (
            ("model", "policy.nemo"),
            ("reward model", "reward_model.nemo"),
            ("report", "report.html"),
        )
        if (folder / file).exists()
    }
    return Learned(
        name=name,
        began_with=Path(model.get("restore_from_path", "")).name,
        metrics=metrics,
        measures=list(held_out_measures(metrics, {}, None)),
        seconds=sum(line.get("timers/total", 0.0) for line in metrics),
        command=str(folder),
        files=files,
    )


def _config(folder: Path) -> Mapping[str, Any]:
    """The configuration in the newest state that can be read; empty where there is none."""
    store = RunStateStore(folder / "run_state")
    for state in reversed(store.survey()[0]):
        try:
            found: Mapping[str, Any] = store.load(state.path).state["config"]
            return found
        except (AlignerError, KeyError):
            continue
    return {}


def _evaluated(folder: Path, name: str) -> Iterator[ComparedPolicy]:
    """One line for each set of an evaluation."""
    try:
        numbers = json.loads((folder / _EVALUATION).read_text())
        lines = [json.loads(line) for line in (folder / "answers.jsonl").open()]
        for key, one in numbers["sets"].items():
            yield ComparedPolicy(
                name if len(numbers["sets"]) == 1 else f"{name}: {key}",
                Path(numbers["model"]).name,
                one["estimates"]["accuracy"]["value"],
                one["prompts"],
                [_sample(line) for line in lines if line["set"] == key and line["sample"] == 0],
            )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} is not a complete evaluation: {error!r}. Make it anew"
        ) from error


def _sample(line: Mapping[str, Any]) -> Sample:
    return Sample(
        step=0,
        split="val",
        prompt=line["prompt"],
        response=line["response"],
        reward=line["reward"],
        prompt_length=0,
        response_length=line["tokens"],
        is_end=line["is_end"],
        ground_truth=None if line["ground_truth"] is None else str(line["ground_truth"]),
    )


def _table(comparison: Comparison) -> Table:
    table = Table(title=comparison.title)
    for column in ("run", "began with", "measured", "before", "after", "steps", "minutes"):
        is_number = column in ("before", "after", "steps", "minutes")
        table.add_column(column, justify="right" if is_number else "left")
    for run in comparison.learned:
        steps, minutes = str(int(run.metrics[-1]["step"])), f"{run.seconds / 60:.1f}"
        for index, one in enumerate(run.measures or [None]):
            head = (run.name, run.began_with) if index == 0 else ("", "")
            tail = (steps, minutes) if index == 0 else ("", "")
            if one is None:
                table.add_row(*head, "nothing held out", "", "", *tail)
                continue
            before = "" if one.before is None else short_number(one.before, 3)
            table.add_row(*head, one.label, before, short_number(one.after, 3), *tail)
    for asked in comparison.policies:
        share = f"{asked.accuracy:.3f} [{asked.interval[0]:.3f}, {asked.interval[1]:.3f}]"
        table.add_row(asked.name, asked.began_with, "right answers", "", share, "", "")
    return table


def save_comparison(report: Path, comparison: Comparison) -> None:
    """Write the page, and beside it ``comparison.json``."""
    report.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(report) as file:
        file.write(render_comparison(comparison).encode())
    write_json(report.with_name("comparison.json"), comparison.numbers())


def held_out_measures(
    metrics: Sequence[Mapping[str, float]], summary: Mapping[str, Any], is_counted: bool | None
) -> Iterator[Measure]:
    """Before and after on what was held out, by the first and the last validation.

    Args:
        metrics: lines of a run's ``metrics.jsonl``.
        summary: of `pipeline_stages.pair_summary`.
        is_counted: whether the reward is just the share of right answers, so that it has no
            line of its own. None means where the two are the same numbers.
    """
    held_out = [line for line in metrics if any(name.startswith("val_") for name in line)]
    if not held_out:
        return
    first, last = held_out[0], held_out[-1]
    counts = {
        "val_rollouts/accuracy": last.get("val_rollouts/num_samples"),
        "val_optim/accuracy": summary.get("pairs"),
    }
    if is_counted is None:
        right = "val_rollouts/accuracy"
        is_counted = all(line.get(right) == line.get(_REWARD) for line in held_out)
    for metric, label, better in _MEASURES:
        if metric in last and not (metric == _REWARD and is_counted):
            count = counts.get(metric)
            share_of = None if count is None else int(count)
            yield Measure(label, first[metric], last[metric], share_of, better)
        if metric == "val_optim/accuracy" and "length_accuracy" in summary:
            share, pairs = summary["length_accuracy"], summary["pairs"]
            yield Measure("… by length alone", None, share, pairs)


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
        folder=Path(__file__).parent / "templates",
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


def _changes(policies: Sequence[ComparedPolicy]) -> Iterator[Change | None]:
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
