"""A whole PPO run on the device, killed once: it goes on and learns."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common import with_repository

ROOT = Path(__file__).parents[2]
STEPS, KILLED_AFTER = 24, 10
PATIENCE_S = 600


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_run_is_killed_goes_on_and_learns(device, tiny_nemo, tmp_path, precision):
    folder = tmp_path / "run"
    command = [
        *(sys.executable, "examples/train_gpt_ppo.py", "--config-name", "recipes/ppo_tiny_cpu"),
        f"model.restore_from_path={tiny_nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        f"trainer.precision={precision}",
        f"trainer.ppo.max_steps={STEPS}",
        "trainer.ppo.val_check_interval=12",
        "trainer.ppo.save_interval=4",
    ]

    def start():
        log = (tmp_path / "log").open("a")
        return subprocess.Popen(command, cwd=ROOT, env=with_repository(), stdout=log, stderr=log)

    def records():
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    first = start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while max((record["step"] for record in records()), default=0) < KILLED_AFTER:
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
    found = records()
    assert sorted({record["step"] for record in found if record["step"]}) == list(
        range(1, STEPS + 1)
    )
    accuracy = [r["val_rollouts/accuracy"] for r in found if "val_rollouts/accuracy" in r]
    print("accuracy:", accuracy)
    assert accuracy[-1] > accuracy[0] + 0.3
