"""A whole PPO run on the device, killed once: it goes on and learns."""

import subprocess
import sys
import time

import pytest
from recipes import ROOT, settings

from aligner.observe.metrics import read_metrics
from benchmarks.common import with_repository

STEPS, KILLED_AFTER = 24, 10
PATIENCE_S = 600


def steps_of(folder):
    """Lines that were written whole."""
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.exists() else -1


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_run_is_killed_goes_on_and_learns(device, tiny_nemo, tmp_path, precision):
    folder = tmp_path / "run"
    command = [
        *(sys.executable, "examples/train_gpt_ppo.py", "--config-name", "recipes/ppo_tiny_cpu"),
        *settings(folder, tiny_nemo),
        *(f"trainer.precision={precision}", f"trainer.ppo.max_steps={STEPS}"),
        *("trainer.ppo.val_check_interval=12", "trainer.ppo.save_interval=4"),
    ]

    def start():
        log = (tmp_path / "log").open("a")
        return subprocess.Popen(command, cwd=ROOT, env=with_repository(), stdout=log, stderr=log)

    first = start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while steps_of(folder) < KILLED_AFTER:
            assert first.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        first.kill()
        first.wait()
    second = start()
    try:
        assert second.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        second.kill()
    assert "resumed after step" in " ".join((tmp_path / "log").read_text().split())
    found = read_metrics(folder / "metrics.jsonl")
    assert {record["step"] for record in found} == {*range(STEPS + 1)}
    accuracy = [r["val_rollouts/accuracy"] for r in found if "val_rollouts/accuracy" in r]
    print("accuracy:", accuracy)
    assert accuracy[-1] > accuracy[0] + 0.3
