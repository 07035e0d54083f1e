"""Parity of critics: a policy learns the same with both backends, and worse without the shift.

    python -m benchmarks.value_parity [--model models/tiny.nemo] [--seeds 1 2 3] [--steps 30]

Runs the tiny recipe to its end with megatron-core, with the DTensor backend, and with the DTensor
backend whose values are not shifted (a switch that only tests and this script reach), for every
seed, and replaces the table in docs/value_parity.md. Exits with 1 if the backends' mean rewards of
the last 5 steps differ by more than 0.02, or if the mean reward of all steps is not at least 0.02
lower without the shift.
"""

import argparse
import datetime
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hydra import compose, initialize_config_dir

from aligner.config import load_config
from aligner.observe.metrics import read_metrics
from benchmarks.common import ROOT

PAGE = ROOT / "docs" / "value_parity.md"
BEGIN, END = "<!-- written by benchmarks/value_parity.py -->", "<!-- end -->"
LAST = 5  # steps whose mean is the end of a curve


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    backend: str
    shifts: bool


VARIANTS = (
    Variant("megatron", "megatron", True),
    Variant("dtensor", "dtensor", True),
    Variant("dtensor, values not shifted", "dtensor", False),
)
COLUMNS = {
    "accuracy at the end": lambda lines: lines[-1]["val_rollouts/accuracy"],
    f"reward, last {LAST} steps": lambda lines: _mean(lines[-LAST:], "train_rollouts/rewards"),
    "reward, all steps": lambda lines: _mean(lines[1:], "train_rollouts/rewards"),
    "value loss, all steps": lambda lines: _mean(lines[1:], "critic/loss"),
}


def _mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(line[key] for line in lines)


def run(variant: Variant, model: str, seed: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, a line per step and one before the first."""
    from aligner.algorithms.ppo.trainer import train_ppo
    from aligner.models.gpt.dtensor.critic import DTensorCriticModel

    settings = [
        f"model.restore_from_path={Path(model).absolute()}",
        f"policy.backend={variant.backend}",
        f"seed={seed}",
        f"trainer.ppo.max_steps={steps}",
        "trainer.ppo.val_check_interval=0",
        "trainer.ppo.save_interval=0",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "exp_manager.save_nemo=false",
    ]
    with (
        initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"),
        mock.patch.object(DTensorCriticModel, "right_shift", variant.shifts),
    ):
        train_ppo(load_config(compose("recipes/ppo_tiny_cpu", overrides=settings)))
    return read_metrics(folder / "metrics.jsonl")


def table(results: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Return Markdown: mean over seeds, and every seed."""
    rows = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for name, runs in results.items():
        cells = []
        for column in COLUMNS.values():
            values = [column(lines) for lines in runs]
            values_text = ", ".join(f"{value:.3f}" for value in values)
            cells.append(f"{statistics.fmean(values):.3f} ({values_text})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def verdict(results: dict[str, list[list[dict[str, Any]]]]) -> list[str]:
    """Return problems in the table."""
    end, all_steps = COLUMNS[f"reward, last {LAST} steps"], COLUMNS["reward, all steps"]

    def mean(name: str, column: Any) -> float:
        return statistics.fmean(column(lines) for lines in results[name])

    megatron, dtensor, unshifted = (variant.name for variant in VARIANTS)
    wrong = []
    if abs(mean(megatron, end) - mean(dtensor, end)) > 0.02:
        wrong.append("the backends end more than 2 points apart")
    if mean(unshifted, all_steps) > mean(dtensor, all_steps) - 0.02:
        wrong.append("without the right shift nothing is worse")
    return wrong


def write_page(text: str) -> None:
    """Replace the text between the marks."""
    page = PAGE.read_text()
    head, foot = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{head}\n{text}\n{foot}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/tiny.nemo", help="the model to begin with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30, help="PPO steps of a run")
    options = parser.parse_args()
    results: dict[str, list[list[dict[str, Any]]]] = {variant.name: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for number, variant in enumerate(VARIANTS):
                run_folder = Path(folder) / f"{number}_{seed}"
                results[variant.name].append(
                    run(variant, options.model, seed, options.steps, run_folder)
                )
    command = shlex.join(["python", "-m", "benchmarks.value_parity", *sys.argv[1:]])
    machine = f"{os.cpu_count()} CPU cores, float32, {datetime.date.today():%Y-%m-%d}"
    seeds = ", ".join(map(str, options.seeds))
    write_page(
        f"`{command}` wrote this table ({machine}). Each cell contains the mean over the seeds "
        f"{seeds}, then the value of each seed.\n\n{table(results)}\n"
    )
    wrong = verdict(results)
    print(table(results), *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
