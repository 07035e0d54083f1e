"""Runs of any kind side by side: for directories of one's own, and for the stages of a pipeline."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aligner.checkpoint.durable import atomic_file, write_json
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.device import accelerator
from aligner.errors import AlignerError, DataError
from aligner.observe.metrics import read_metrics
from aligner.observe.report.chart import short_number
from aligner.observe.report.comparison import (
    Comparison,
    Learned,
    Measure,
    Policy,
    render_comparison,
)
from aligner.observe.samples import Sample
from aligner.packages import describe_environment

_METRICS, _EVALUATION = "metrics.jsonl", "evaluation.json"
_REWARD = "val_rollouts/rewards"
# Metric of a validation, what it is called here, and whether more (1) or less (-1) is better.
_HELD_OUT = (
    ("val_rollouts/accuracy", "right answers", 1),
    (_REWARD, "reward", 1),
    ("val_optim/accuracy", "pairs ranked right", 1),
    ("val_optim/rewards_margin", "margin", 1),
    ("val_optim/loss", "loss", -1),
)


def compare_runs(folders: Sequence[Path], output: Path, title: str) -> Path:
    """Write ``report.html`` and ``comparison.json`` to ``output``; returns the report.

    ``folders``: directories of training runs (with ``metrics.jsonl``) and of evaluations (with
    ``evaluation.json``), which are only read.

    Raises:
        DataError: a directory is neither.
    """
    learned: list[Learned] = []
    policies: list[Policy] = []
    for folder, name in zip(folders, _names(folders), strict=True):
        if (folder / _EVALUATION).is_file():
            policies += _evaluated(folder, name)
        elif (folder / _METRICS).is_file():
            learned.append(_run(folder, name))
        else:
            raise DataError(
                f"{folder} holds neither {_METRICS} (a training run) nor {_EVALUATION} (an "
                "evaluation); give directories that a run wrote"
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


def _evaluated(folder: Path, name: str) -> Iterator[Policy]:
    """One line for each set of an evaluation."""
    try:
        numbers = json.loads((folder / _EVALUATION).read_text())
        lines = [json.loads(line) for line in (folder / "answers.jsonl").open()]
        for key, one in numbers["sets"].items():
            yield Policy(
                name if len(numbers["sets"]) == 1 else f"{name}: {key}",
                Path(numbers["model"]).name,
                one["estimates"]["accuracy"]["value"],
                one["prompts"],
                [_sample(line) for line in lines if line["set"] == key and line["sample"] == 0],
            )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} is not a complete evaluation: {error!r}; make it anew"
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
            line of its own; None: where the two are the same numbers.
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
    for metric, label, better in _HELD_OUT:
        if metric in last and not (metric == _REWARD and is_counted):
            count = counts.get(metric)
            share_of = None if count is None else int(count)
            yield Measure(label, first[metric], last[metric], share_of, better)
        if metric == "val_optim/accuracy" and "length_accuracy" in summary:
            share, pairs = summary["length_accuracy"], summary["pairs"]
            yield Measure("… by length alone", None, share, pairs)
