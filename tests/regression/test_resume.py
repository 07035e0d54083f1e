"""A run that SIGKILL stops, wherever, ends with the numbers and weights of one that was left alone.

Whole processes, as users start them; the killed run is killed once while stepping and once while
it is saving.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600  # a start takes about ten seconds, many times that on a crowded machine
# Starts of whole processes, seven in all.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def start(tiny_nemo):
    """``start(folder)`` begins or continues a run there; none outlives the tests."""
    processes = []

    def launch(folder):
        command = [
            *(sys.executable, str(ROOT / "examples" / "train_gpt_ppo.py")),
            *("--config-name", "recipes/ppo_tiny_cpu"),
            f"model.restore_from_path={tiny_nemo}",
            f"exp_manager.explicit_log_dir={folder}",
            "exp_manager.create_tensorboard_logger=false",
            "trainer.ppo.max_steps=7",
            "trainer.ppo.save_interval=2",
            "trainer.ppo.val_check_interval=3",
        ]
        process = subprocess.Popen(
            command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield launch
    for process in processes:
        if process.poll() is None:
            process.kill()


def finished(process):
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    return output


def wait_for(condition, process):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(process, number=signal.SIGKILL):
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    return output


def result(folder):
    """The metrics as they stand in the file (NaN is a word there), times aside; the weights."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = [
        {name: value for name, value in record.items() if not name.startswith("timers/")}
        for record in records
    ]
    return lines, hashlib.sha256((folder / "policy.nemo").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, start):
    folder = tmp_path_factory.mktemp("left_alone") / "run"
    output = finished(start(folder))
    ending = "\n".join(output.splitlines()[-5:])
    for word in ("report", "samples", "metrics", "checkpoint", "trained .nemo"):
        assert word in ending
    return result(folder)


def test_killed_twice(tmp_path, start, left_alone):
    folder = tmp_path / "run"
    states = folder / "run_state"

    process = start(folder)
    wait_for(lambda: len(read_metrics(folder / "metrics.jsonl")) > 3, process)  # step 3 is made
    kill(process)
    process = start(folder)
    wait_for(lambda: any(states.glob(".tmp-step_*")), process)  # a state is being written
    kill(process)
    output = finished(start(folder))
    assert "resumed after step" in " ".join(output.split())
    assert result(folder) == left_alone


def test_sigterm_saves_and_exits_cleanly(tmp_path, start, left_alone):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(lambda: len(read_metrics(folder / "metrics.jsonl")) > 1, process)
    output = kill(process, signal.SIGTERM)
    assert process.returncode == 0, output
    assert "the same command continues" in " ".join(output.split())
    finished(start(folder))
    assert result(folder) == left_alone
