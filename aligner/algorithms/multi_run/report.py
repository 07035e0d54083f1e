"""Numbers and pages of a comparison of runs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.checkpoint.durable import atomic_file, write_json
from aligner.config import BaseRunConfig, DPORunConfig, RewardRunConfig
from aligner.observe.report.comparison import Comparison, Measure, render_comparison

_REWARD = "val_rollouts/rewards"
# Metric of a validation, what it is called here, and whether more (1) or less (-1) is better.
_HELD_OUT = (
    ("val_rollouts/accuracy", "right answers", 1),
    (_REWARD, "reward", 1),
    ("val_optim/accuracy", "pairs ranked right", 1),
    ("val_optim/rewards_margin", "margin", 1),
    ("val_optim/loss", "loss", -1),
)


def pair_summary(config: BaseRunConfig) -> dict[str, float]:
    """``pairs`` held out and ``length_accuracy``, of a run that learns from pairs; else nothing."""
    if not isinstance(config, RewardRunConfig | DPORunConfig) or config.rows_per_example != 2:
        return {}
    if config.data.validation is None:
        return {}
    from aligner.algorithms.run.startup import describe_model_of  # imports torch and the tokenizers
    from aligner.data.preferences import PairDataset, length_accuracy

    tokenizer, _ = describe_model_of(config)
    train = PairDataset.load(config.data.train, tokenizer, config.data)
    held_out = PairDataset.load(config.data.validation, tokenizer, config.data)
    count = min(len(held_out), config.loop.limit_val_examples or len(held_out))
    return {
        "pairs": count,
        "length_accuracy": length_accuracy(
            (train[index] for index in range(len(train))),
            [held_out[index] for index in range(count)],
        ),
    }


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
        summary: of `pair_summary`.
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
