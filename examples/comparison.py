"""Comparison of training runs and evaluations, of single directories or of a pipeline's stages."""

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
from aligner.observe.metrics import Sample, read_metrics
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
from aligner.packages import describe_environment

_METRICS, _EVALUATION = "metrics.jsonl", "evaluation.json"
_REWARD = "val_rollouts/rewards"
# Metric of a validation, its label, and whether larger (1) or smaller (-1) values are better.
_MEASURES = (
    ("val_rollouts/accuracy", "right answers", 1),
    (_REWARD, "reward", 1),
    ("val_optim/accuracy", "pairs ranked right", 1),
    ("val_optim/rewards_margin", "margin", 1),
    ("val_optim/loss", "loss", -1),
)
_MOST_PROMPTS = 12
_HELD_OUT = "held out"  # label of the lines
_SHARES = (0.0, 1.0)  # values that every axis of shares contains

# Charts of a run: metric without its group, heading, values that every axis contains.
_CURVES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("accuracy", "accuracy", _SHARES),
    ("rewards", "reward", ()),
    ("rewards_margin", "margin", ()),
    ("loss", "loss", ()),
)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Compute the 95 % confidence interval of a share of independent answers (Wilson, 1927).

    Unlike the normal approximation, the interval is within [0, 1], and it is not empty for a share
    of 0 or 1.
    """
    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share of {share} of {count} answers")
    squared = Z95**2 / count
    middle = (share + squared / 2) / (1 + squared)
    half = Z95 * math.sqrt(share * (1 - share) / count + squared / count / 4) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class ComparedPolicy:
    """A policy with its results on the held-out problems, one sampled answer per problem."""

    name: str
    began_with: str | None  # the policy it was trained from (None: the start of a pipeline)
    accuracy: float  # share of right answers
    count: int  # answers
    samples: Sequence[Sample]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of ``accuracy``."""
        return wilson_interval(self.accuracy, self.count)


@dataclass(frozen=True)
class Measure:
    """A metric of a run on held-out data, before and after training."""

    label: str
    before: float | None  # None if it does not depend on the run
    after: float
    count: int | None = None  # samples of a share (None: not a share)
    better: int = 1  # 1: larger, -1: smaller

    @property
    def change(self) -> Change | None:
        """Difference of ``after`` and ``before``. None without ``before``."""
        return None if self.before is None else Change.between(self.before, self.after, self.better)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of a share. None for other metrics."""
        return None if self.count is None else wilson_interval(self.after, self.count)


@dataclass(frozen=True)
class Learned:
    """A training run with its results."""

    name: str
    began_with: str
    metrics: Sequence[Mapping[str, float]]  # lines of metrics.jsonl
    measures: Sequence[Measure]
    seconds: float  # duration, loading and saving included
    command: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """Content of the report."""

    title: str
    policies: Sequence[ComparedPolicy]
    learned: Sequence[Learned]
    environment: Mapping[str, str]
    missing: int = 0  # runs that are not finished
    heading: str = "Right answers to the same held-out problems"  # of the table of policies

    def numbers(self) -> dict[str, Any]:
        """Return the content of ``comparison.json``."""
        return {
            "policies": {
                policy.name: {
                    "began_with": policy.began_with,
                    "accuracy": policy.accuracy,
                    "interval_95": list(policy.interval),
                    "count": policy.count,
                }
                for policy in self.policies
            },
            "runs": {
                run.name: {
                    "began_with": run.began_with,
                    "seconds": round(run.seconds, 1),
                    "held_out": {
                        measure.label: {
                            "before": measure.before,
                            "after": measure.after,
                            "interval_95": measure.interval and list(measure.interval),
                            "count": measure.count,
                        }
                        for measure in run.measures
                    },
                }
                for run in self.learned
            },
        }


def compare_runs(folders: Sequence[Path], output: Path, title: str) -> Path:
    """Write ``report.html`` and ``comparison.json`` to ``output``, and return the report's path.

    ``folders``: directories of training runs (with ``metrics.jsonl``) and of evaluations (with
    ``evaluation.json``), which are not changed.

    Raises:
        DataError: a directory contains neither file.
    """
    # Results of training runs and of evaluations.
    learned: list[Learned] = []
    policies: list[ComparedPolicy] = []
    for folder, name in zip(folders, _names(folders), strict=True):
        if (folder / _EVALUATION).is_file():
            policies += _evaluated(folder, name)
        elif (folder / _METRICS).is_file():
            learned.append(_run(folder, name))
        else:
            raise DataError(
                f"{folder} contains neither {_METRICS} (a training run) nor {_EVALUATION} (an "
                "evaluation). Give directories of runs"
            )

    # Report and table.
    comparison = Comparison(
        title=title,
        policies=policies,
        learned=learned,
        environment=describe_environment(accelerator.description()),
        heading="The answers of each evaluation, and the share of right answers",
    )
    report = output / "report.html"
    save_comparison(report, comparison)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(comparison))
    console.print(f"report  {report}")
    return report


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the names of directories, or their paths if several have the same name."""
    names = [folder.expanduser().resolve().name for folder in folders]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else str(folder)
        for name, folder in zip(names, folders, strict=True)
    ]


def _run(folder: Path, name: str) -> Learned:
    metrics = read_metrics(folder / _METRICS)
    if not metrics:
        raise DataError(f"{folder / _METRICS} has no complete line, so the run made no step")

    # Initial model and written files.
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
    """Return the configuration in the newest readable run state, or {} if there is none."""
    store = RunStateStore(folder / "run_state")
    for state in reversed(store.survey()[0]):
        try:
            config: Mapping[str, Any] = store.load(state.path).state["config"]
            return config
        except (AlignerError, KeyError):
            continue
    return {}


def _evaluated(folder: Path, name: str) -> Iterator[ComparedPolicy]:
    """Yield the results of each set of an evaluation."""
    try:
        numbers = json.loads((folder / _EVALUATION).read_text())
        lines = [json.loads(line) for line in (folder / "answers.jsonl").open()]
        for key, result in numbers["sets"].items():
            yield ComparedPolicy(
                name if len(numbers["sets"]) == 1 else f"{name}: {key}",
                Path(numbers["model"]).name,
                result["estimates"]["accuracy"]["value"],
                result["prompts"],
                [_sample(line) for line in lines if line["set"] == key and line["sample"] == 0],
            )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} is not a complete evaluation: {error!r}. Run the evaluation again"
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
    # A row per measure. The first row of a run contains its name and length.
    for run in comparison.learned:
        steps, minutes = str(int(run.metrics[-1]["step"])), f"{run.seconds / 60:.1f}"
        for index, measure in enumerate(run.measures or [None]):
            head = (run.name, run.began_with) if index == 0 else ("", "")
            tail = (steps, minutes) if index == 0 else ("", "")
            if measure is None:
                table.add_row(*head, "nothing held out", "", "", *tail)
                continue
            first = "" if measure.before is None else short_number(measure.before, 3)
            table.add_row(*head, measure.label, first, short_number(measure.after, 3), *tail)
    for policy in comparison.policies:
        low, high = policy.interval
        share = f"{policy.accuracy:.3f} [{low:.3f}, {high:.3f}]"
        table.add_row(policy.name, policy.began_with, "right answers", "", share, "", "")
    return table


def save_comparison(report: Path, comparison: Comparison) -> None:
    """Write the report, and ``comparison.json`` in the same folder."""
    report.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(report) as file:
        file.write(render_comparison(comparison).encode())
    write_json(report.with_name("comparison.json"), comparison.numbers())


def held_out_measures(
    metrics: Sequence[Mapping[str, float]], summary: Mapping[str, Any], is_counted: bool | None
) -> Iterator[Measure]:
    """Yield the held-out metrics of the first and the last validation.

    Args:
        metrics: lines of a run's ``metrics.jsonl``.
        summary: result of `pipeline_stages.pair_summary`.
        is_counted: whether the reward equals the share of right answers and is omitted. None means
            to compare the two metrics.
    """
    # Lines of validations.
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

    # Reward models are also compared with a preference for the longer response.
    for metric, label, better in _MEASURES:
        if metric in last and not (metric == _REWARD and is_counted):
            count = counts.get(metric)
            share_of = None if count is None else int(count)
            yield Measure(label, first[metric], last[metric], share_of, better)
        if metric == "val_optim/accuracy" and "length_accuracy" in summary:
            share, pairs = summary["length_accuracy"], summary["pairs"]
            yield Measure("… by length alone", None, share, pairs)


def render_comparison(comparison: Comparison) -> str:
    """Return the report as HTML."""
    policies, runs = comparison.policies, comparison.learned
    minutes = sum(run.seconds for run in runs) / 60
    lead = f"{len(runs)} training runs, {minutes:.1f} minutes of training."
    if comparison.missing:
        lead += f" {comparison.missing} runs are missing. The same command continues."
    # Prompts with a sample of every policy.
    answers = [{sample.prompt: sample for sample in policy.samples} for policy in policies]
    shared = [p for p in (answers or [{}])[0] if all(p in samples for samples in answers)]
    commands: dict[str, str] = {}
    for run in runs:
        commands[run.name] = run.command
        commands |= {f"{run.name}: {name}": path for name, path in run.files.items()}
    counts = " or ".join(map(str, sorted({policy.count for policy in policies})))
    return render(
        "comparison.html",
        folder=Path(__file__).parent / "templates",
        title=comparison.title,
        lead=lead,
        policies_heading=comparison.heading,
        policies_lead=f"Share of right answers, one sampled answer to each of {counts} prompts "
        "that no run learned from. In brackets: 95 % confidence interval.",
        policies=list(zip(policies, _changes(policies), strict=True)),
        names=[policy.name for policy in policies],
        shared_answers=[
            [samples[prompt] for samples in answers] for prompt in shared[:_MOST_PROMPTS]
        ],
        runs=runs,
        curves=drawn(card for run in runs for card in _curves(run)),
        times=bars([(run.name, run.seconds) for run in runs]),
        commands=commands,
        environment=comparison.environment,
    )


def _changes(policies: Sequence[ComparedPolicy]) -> Iterator[Change | None]:
    """Yield the difference of each policy's accuracy from the policy it was trained from."""
    by_name = {policy.name: policy for policy in policies}
    for policy in policies:
        parent = by_name.get(policy.began_with or "")
        yield None if parent is None else Change.between(parent.accuracy, policy.accuracy, 1)


def _curves(run: Learned) -> Iterator[ChartCard]:
    """Yield the charts of metrics on held-out data."""
    series = collect_series(run.metrics)
    counted, rewarded = (series.get(f"val_rollouts/{n}") for n in ("accuracy", "rewards"))
    is_same = counted is not None and rewarded is not None and counted == rewarded
    for metric, heading, shows in _CURVES:
        lines = lines_of(series, metric, _HELD_OUT)
        if any(line.label == _HELD_OUT for line in lines) and not (metric == "rewards" and is_same):
            title = f"{run.name}: {heading}"
            yield ChartCard(title, "", title, lines, shows)
