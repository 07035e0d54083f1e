"""The HTML report of a run, one file without external parts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aligner.checkpoint.durable import atomic_file
from aligner.observe.diagnostics import ROUNDING_GAPS, gap_verdict
from aligner.observe.metrics import MetricInfo, Sample, describe, read_metrics, read_samples
from aligner.observe.report import chart
from aligner.observe.report.page import render


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's report."""

    title: str
    config: str  # the resolved configuration as YAML
    environment: Mapping[str, str]  # versions, machine, command
    metrics: Sequence[Mapping[str, float]] = ()  # lines of metrics.jsonl, which contain ``step``
    samples: Sequence[Sample] = ()
    artifacts: Mapping[str, str] = field(default_factory=dict)  # file name → path
    status: str = ""  # one sentence about how the run ended
    precision: str = ""  # value of ``trainer.precision``, empty if unknown


# Metric, label, and whether more (1) or less (-1) is better, or neither (0).
_HEADLINES = (
    ("val_rollouts/accuracy", "Validation accuracy", 1),
    ("val_rollouts/rewards", "Validation reward", 1),
    ("train_rollouts/rewards", "Training reward", 1),
    ("val_optim/accuracy", "Validation accuracy", 1),
    ("val_optim/loss", "Validation loss", -1),
    ("train_rollouts/init_policy_kl", "KL to the initial policy", 0),
    ("train_rollouts/generation_length", "Response length (tokens)", 0),
)

_ROLLOUT_ACCURACIES = {"train_rollouts/accuracy", "val_rollouts/accuracy"}
_MAX_ROWS = 12  # of a table of samples

# Charts at the top: metric without its group, heading, advice for the reader.
_OVERVIEW = (
    ("accuracy", "Accuracy", "Share of right answers. Should rise."),
    ("loss", "Loss", "Falls on examples it has not seen, as long as there is something to learn."),
    ("rewards", "Reward", "What the reward function gives. Should rise."),
    (
        "init_policy_kl",
        "KL to the initial policy",
        "How far the policy has moved. Rises slowly in a healthy run. A jump is a warning.",
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


def write_report(folder: Path, run: RunRecord) -> Path:
    """Write ``<folder>/report.html`` from ``run``, metrics and samples. Return its path."""
    metrics, samples = folder / "metrics.jsonl", folder / "samples.jsonl"
    record = replace(run, metrics=read_metrics(metrics), samples=read_samples(samples))
    path = folder / "report.html"
    with atomic_file(path) as file:
        file.write(render_report(record).encode(errors="replace"))
    return path


def render_report(run: RunRecord) -> str:
    """Return the report as HTML."""
    series = chart.collect_series(run.metrics)
    constants = {name: s.constant for name, s in sorted(series.items()) if s.constant is not None}
    last = max((int(line["step"]) for line in run.metrics), default=0)
    return render(
        "run.html",
        title=run.title,
        lead=f"{last:,} steps. {run.status}".strip(),
        has_metrics=bool(series),
        tiles=[_tile(series, *headline) for headline in _HEADLINES if headline[0] in series],
        has_rollouts=any(name.startswith(("train_rollouts/", "val_rollouts/")) for name in series),
        overview=_overview(series),
        gap=_gap(series, run.precision),
        has_samples=bool(run.samples),
        has_conversations=any(sample.turns for sample in run.samples),
        pairs=before_and_after(run.samples)[:_MAX_ROWS],
        training_samples=_training_samples(run.samples),
        phases=_phases(series),
        groups=_groups({name: s for name, s in series.items() if name not in constants}),
        constants=[(name, value, _info(name)) for name, value in constants.items()],
        artifacts=run.artifacts,
        config=run.config,
        environment=run.environment,
    )


def _tile(
    series: Mapping[str, chart.Series], metric: str, label: str, better: int
) -> dict[str, Any]:
    values, steps = series[metric].values, series[metric].steps
    first, last = values[0], values[-1]
    note = f"step {steps[0]} → {steps[-1]}"
    # The standard error of the accuracy on the samples of the last validation.
    count = series.get("val_rollouts/num_samples")
    if metric == "val_rollouts/accuracy" and count is not None and 0 <= last <= 1:
        error = math.sqrt(last * (1 - last) / max(count.values[-1], 1))
        note += f", standard error {chart.short_number(round(error, 3))}"
    change = chart.Change.between(first, last, better)
    ends = {"first": _rounded(first, last), "last": _rounded(last, first)}
    return {"label": label, **ends, "change": change, "note": note}


def _rounded(value: float, neighbour: float) -> str:
    """Format ``value``, as 0 if it is below 0.05 % of ``neighbour``, the value beside it."""
    is_negligible = math.isfinite(neighbour) and abs(value) < 5e-4 * abs(neighbour)
    return chart.short_number(0.0 if is_negligible else value, 3)


def _overview(series: Mapping[str, chart.Series]) -> list[chart.ChartCard]:
    cards = []
    for name, heading, lead in _OVERVIEW:
        # The loss means little in a run that does not validate the loss.
        if name == "loss" and "val_optim/loss" not in series:
            continue
        if name == "accuracy" and not _ROLLOUT_ACCURACIES & series.keys():
            lead = f"{_info('val_optim/accuracy').meaning} Should rise."
        lines = chart.lines_of(series, name, "validation")
        cards.append(chart.ChartCard(heading, lead, lead, lines))
    return chart.drawn(cards)


def _gap(series: Mapping[str, chart.Series], precision: str) -> tuple[str, dict[str, str]] | None:
    """Return the sampler's log-prob gap as (text, table rows), or None if it was not measured."""
    gaps = series.get("sampler/logprob_gap_mean")
    if gaps is None:
        return None
    rows = {
        f"this run, step {gaps.steps[0]}": chart.short_number(gaps.values[0]),
        f"this run, step {gaps.steps[-1]}": chart.short_number(gaps.values[-1]),
        "this run, largest": chart.short_number(max(gaps.values)),
    }
    for name, limit in ROUNDING_GAPS.values():
        rows[f"rounding in {name}"] = f"below {chart.short_number(limit)}"
    lead = "Mean absolute difference of their log-probs of the same tokens, in nats."
    # In the first step, the trainer's weights are those that sampled.
    verdict = gap_verdict(gaps.values[0], precision)
    if verdict is not None:
        lead += f" At the beginning it is {verdict[1]}"
    return lead, rows


def before_and_after(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pair the first and the last validation's samples that have the same prompt."""
    held_out = [sample for sample in samples if sample.split == "val"]
    if not held_out:
        return []
    first_step, last_step = held_out[0].step, held_out[-1].step
    if first_step == last_step:
        return []
    first = {sample.prompt: sample for sample in held_out if sample.step == first_step}
    last = {sample.prompt: sample for sample in held_out if sample.step == last_step}
    return [(sample, last[prompt]) for prompt, sample in first.items() if prompt in last]


def _training_samples(samples: Sequence[Sample]) -> list[tuple[str, int, list[Sample]]]:
    """Return (title, step, samples) for the first and the last step with samples."""
    training = [sample for sample in samples if sample.split == "train"]
    steps = sorted({sample.step for sample in training})
    return [
        (name, step, [sample for sample in training if sample.step == step][:_MAX_ROWS])
        for step, name in zip(steps[:1] + steps[1:][-1:], ("First", "Last"), strict=False)
    ]


def _phases(series: Mapping[str, chart.Series]) -> list[chart.Bar]:
    phases = {
        name.removeprefix("timers/").replace("_", " "): sum(timer.values)
        for name, timer in series.items()
        if name.startswith("timers/") and name != "timers/total" and "per_second" not in name
    }
    return chart.bars(list(phases.items()))


def _info(name: str) -> MetricInfo:
    return describe(name) or MetricInfo("", "")


def _groups(series: Mapping[str, chart.Series]) -> list[tuple[str, bool, list[chart.ChartCard]]]:
    """Return (heading, whether it is unfolded, charts) for each group of metrics."""
    groups = []
    for group, heading in _GROUPS.items():
        cards = []
        for name in sorted(name for name in series if name.startswith(f"{group}/")):
            title, info = name.removeprefix(f"{group}/"), _info(name)
            tooltip = f"{name}: {info.meaning} Over: {info.over}"
            card = chart.ChartCard(title, info.meaning, tooltip, [series[name]], is_single=True)
            cards.append(card)
        if shown := chart.drawn(cards):
            groups.append((f"{heading}: {group}/", group != "timers", shown))
    return groups
