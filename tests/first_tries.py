"""Commands and data of the journeys."""

import json
import os
import subprocess

import pyarrow as pa
from pyarrow import parquet

SMALL = ("model.restore_from_path=tiny.nemo", "exp_manager.explicit_log_dir=runs/first")
SAMPLING = (
    *("data.train.source=rows", "reward.function=rewards.py:reward", "trainer.ppo.max_steps=2"),
    *("model.ppo.num_rollout_samples=16", "model.ppo.num_rollouts_per_prompt=4"),
    "model.ppo.length_params.max_length=4",
)
# For runs with data and rewards of their own.
LENGTHS = [value for value in SAMPLING if not value.startswith(("reward.", "data."))]


def python_run(command, folder, installed, **variables):
    environment = {**os.environ, "PYTHONPATH": str(installed), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def write(path, rows):
    """Write rows as the format of the suffix."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(folder):
    lines = (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(lines):
    """Step → loss. A killed run repeats steps that no state contains."""
    return {line["step"]: line["train_optim/loss"] for line in lines if "train_optim/loss" in line}
