"""A small PPO run on either engine, in this process or in one of its own."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from aligner.config import load_config

ROOT = Path(__file__).parents[2]
STEPS = 3
SMALL = [
    # Some sample of every step is rewarded: without a signal the gradient is rounding noise, which
    # Adam makes steps of, and no two layouts round alike.
    "seed=2",
    "exp_manager.create_tensorboard_logger=false",
    "exp_manager.save_top_k=5",
    f"trainer.ppo.max_steps={STEPS}",
    "trainer.ppo.save_interval=1",
    "trainer.ppo.val_check_interval=1",  # what is not measured is not kept beside the newest
    "model.ppo.num_rollout_samples=16",
    "model.global_batch_size=16",
    "model.micro_batch_size=8",
    "critic.global_batch_size=16",
    "critic.micro_batch_size=8",
    "data.train.arguments.size=64",
    "data.validation.arguments.size=8",
]
ON_RAY = "cluster.engine=ray"


def settings(folder, nemo, *overrides):
    return [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        *SMALL,
        *overrides,
    ]


def train(folder, nemo, *overrides, recipe="ppo_tiny_cpu"):
    """The run, driven by this process."""
    from aligner.algorithms.ppo.trainer import train_ppo

    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        tree = compose(f"recipes/{recipe}", overrides=settings(folder, nemo, *overrides))
    train_ppo(load_config(tree))
    return result(folder)


def start(folder, nemo, *overrides, environment=None, recipe="ppo_tiny_cpu"):
    """The run in a process of its own, as users start it."""
    return subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "examples" / "train_gpt_ppo.py")),
            *("--config-name", f"recipes/{recipe}"),
            *settings(folder, nemo, *overrides),
        ],
        cwd=folder.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process, limit_s=900):
    output, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, output
    return output


def result(folder):
    """The metrics as they stand in the file (NaN is a word there), times aside; the weights."""
    weights = hashlib.sha256((folder / "policy.nemo").read_bytes()).hexdigest()
    return metrics(folder), weights


def metrics(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {
            # NaN is not equal to itself, and its word is
            name: repr(value) if value != value else value
            for name, value in record.items()
            if not name.startswith("timers/")
        }
        for record in records
    ]


def go_back_to(step, source, folder):
    """A copy of a run as it was after ``step``."""
    shutil.copytree(source, folder)
    (folder / "policy.nemo").unlink()
    for state in (folder / "run_state").glob("step_*"):
        if int(state.name.removeprefix("step_")) > step:
            shutil.rmtree(state)
    return folder


def largest_difference(one, other):
    """Over all metrics of all steps, relative to 1 or to the larger value."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    assert [line.keys() for line in one] == [line.keys() for line in other]
    pairs = (
        (a[name], b[name])
        for a, b in zip(one, other, strict=True)
        for name in a
        if not isinstance(a[name], str)
    )
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)
