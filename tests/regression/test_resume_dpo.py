"""A preference run that SIGKILL stops ends with the numbers and weights of one left alone.

The runs are processes forked from a server in which the imports are done.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from aligner.observe.metrics import read_metrics

CONF = Path(__file__).parents[2] / "conf"
PATIENCE_S = 250


def train(folder, nemo):
    """The KTO recipe, shortened: with a reference that was asked and a baseline of the policy."""
    from hydra import compose, initialize_config_dir

    from aligner.algorithms.preference.build import train_dpo
    from aligner.config import DPORunConfig, load_config

    settings = [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "trainer.dpo.max_steps=6",
        "trainer.dpo.save_interval=2",
        "trainer.dpo.val_check_interval=3",
        "data.train.arguments.size=192",
        "data.validation.arguments.size=16",
    ]
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        tree = compose("recipes/kto_tiny_cpu", overrides=settings)
    train_dpo(load_config(tree, DPORunConfig))


@pytest.fixture
def start(tiny_nemo):
    """``start(folder)`` begins or continues a run there; none outlives the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aligner.algorithms.preference.build"])
    processes = []

    def launch(folder):
        process = context.Process(target=train, args=(folder, tiny_nemo), daemon=True)
        processes.append(process)
        process.start()
        return process

    yield launch
    for process in processes:
        process.kill()
        process.join()


def finish(process):
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def result(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = [
        {name: value for name, value in record.items() if not name.startswith("timers/")}
        for record in records
    ]
    return lines, hashlib.sha256((folder / "policy.nemo").read_bytes()).hexdigest()


def test_killed_and_continued(tmp_path, start):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finish(start(alone))
    process = start(killed)
    deadline = time.monotonic() + PATIENCE_S
    # Step 3 is made, and the state of step 2, which is written beside it, is whole.
    while len(read_metrics(killed / "metrics.jsonl")) < 4 or not any(
        (killed / "run_state").glob("step_*")
    ):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    asked = (killed / "reference_logprobs.pt").stat().st_mtime_ns
    finish(start(killed))
    assert (killed / "reference_logprobs.pt").stat().st_mtime_ns == asked  # not asked again
    assert result(killed) == result(alone)
