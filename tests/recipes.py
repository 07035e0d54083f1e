"""Runs of the configurations and recipes in conf/ in the process of a test, and what they wrote."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from aligner.catalog import ALGORITHMS, AlgorithmEntry, imported
from aligner.config import load_config
from aligner.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
# Recipes whose first word is not the name of their algorithm.
_OTHER_NAMES = {"grpo": "reinforce", "rloo": "reinforce", "kto": "dpo"}


def algorithm_of(name: str) -> AlgorithmEntry:
    """The algorithm of a recipe or a configuration in conf/."""
    first = name.removeprefix("gpt_").partition("_")[0]
    return ALGORITHMS[_OTHER_NAMES.get(first, first)]


def section_of(name: str) -> str:
    """The algorithm's section of ``trainer``."""
    algorithm = algorithm_of(name).name
    return {"reinforce": "ppo", "reward": "reward_model"}.get(algorithm, algorithm)


def settings(folder: Path, nemo: Path) -> list[str]:
    """Overrides of every run: its model and its folder."""
    return [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
    ]


def composed(name: str, *overrides: str) -> Any:
    """The configuration tree of a recipe, or of a configuration ``gpt_...``."""
    path = name if name.startswith("gpt_") else f"recipes/{name}"
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return compose(path, overrides=list(overrides))


def run(folder: Path, nemo: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Train as a recipe or a configuration says, and return the metrics."""
    algorithm = algorithm_of(name)
    tree = composed(name, *settings(folder, nemo), *overrides)
    imported(algorithm.builder)(load_config(tree, algorithm.root_class))
    return read_metrics(folder / "metrics.jsonl")


def run_steps(folder: Path, nemo: Path, name: str, steps: int, *overrides: str) -> None:
    """`run` up to step ``steps``; -1 is until the data ends."""
    run(folder, nemo, name, f"trainer.{section_of(name)}.max_steps={steps}", *overrides)


def numbers(folder: Path, *without: str) -> list[dict[str, Any]]:
    """What every step wrote, without times and names that begin with a word of ``without``.

    NaN is a word there, so that it equals itself.
    """
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("timers/", *without))
        }
        for record in records
    ]


def near(line: dict[str, Any], rel: float = 2e-4, abs: float = 2e-5) -> dict[str, Any]:
    """A line of `numbers` for comparisons that allow rounding."""
    return {
        name: value if isinstance(value, str) else pytest.approx(value, rel=rel, abs=abs)
        for name, value in line.items()
    }


def trained_hash(folder: Path) -> str:
    """SHA-256 of the run's only ``.nemo`` file."""
    (path,) = folder.glob("*.nemo")
    return hashlib.sha256(path.read_bytes()).hexdigest()
