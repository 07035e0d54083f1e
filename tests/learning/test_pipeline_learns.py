"""The whole pipeline on a tiny model, as users start it, killed on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from recipes import ROOT

from aligner.observe.metrics import read_metrics

PATIENCE_S = 1500
PIPELINE = """
title: A tiny model learns to begin with a digit
folder: results/tiny
start: tiny.nemo
evaluation:
  script: train_gpt_rs
  recipe: rs_tiny_cpu
  overrides: [trainer.rs.max_steps=0, exp_manager.save_nemo=false]
stages:
  - {name: sft, script: train_gpt_sft, recipe: sft_tiny_cpu, overrides: [trainer.sft.max_steps=4]}
  - name: reward
    script: train_gpt_reward
    recipe: reward_tiny_cpu
    overrides: [trainer.reward_model.max_steps=40]
    takes: {model.restore_from_path: sft}
  - name: ppo
    script: train_gpt_ppo
    recipe: ppo_tiny_cpu
    overrides:
      - reward=model
      - reward.function=aligner.rewards.regex_format:reward
      - reward.kwargs.pattern="[0-9].*"
      - trainer.ppo.max_steps=20
      - trainer.ppo.save_interval=2
    takes: {model.restore_from_path: sft, reward.model.restore_from_path: reward}
  - {name: grpo, script: train_gpt_reinforce, recipe: grpo_tiny_cpu,
     overrides: [trainer.ppo.max_steps=20], takes: {model.restore_from_path: sft}}
  - {name: rs, script: train_gpt_rs, recipe: rs_tiny_cpu,
     overrides: [trainer.rs.max_steps=30], takes: {model.restore_from_path: sft}}
  - {name: dpo, script: train_gpt_dpo, recipe: dpo_tiny_cpu,
     overrides: [trainer.dpo.max_steps=8], takes: {model.restore_from_path: sft}}
"""

pytestmark = [pytest.mark.extended, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture
def start(tmp_path, tiny_nemo):
    """``start()`` begins or continues the pipeline; nothing of it outlives the test."""
    shutil.copy(tiny_nemo, tmp_path / "tiny.nemo")
    (tmp_path / "tiny.yaml").write_text(PIPELINE)
    processes = []

    def launch():
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "pipeline.py"), "tiny.yaml"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # the stage's process is killed with it
        )
        processes.append(process)
        return process

    yield launch
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def test_killed_while_ppo_learns_and_continued(tmp_path, start):
    folder = tmp_path / "results" / "tiny"
    process = start()
    deadline = time.monotonic() + PATIENCE_S
    while not any((folder / "ppo" / "run_state").glob("step_*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (folder / "ppo" / "policy.nemo").exists()
    left = (folder / "sft" / "policy.nemo").stat().st_mtime_ns

    output, _ = start().communicate(timeout=PATIENCE_S)
    assert "resumed after step" in " ".join(output.split()), output
    assert (folder / "sft" / "policy.nemo").stat().st_mtime_ns == left  # not made again
    assert [line["step"] for line in read_metrics(folder / "ppo" / "metrics.jsonl")] == [*range(21)]

    numbers = json.loads((folder / "comparison.json").read_text())
    right = {name: policy["accuracy"] for name, policy in numbers["policies"].items()}
    assert list(right) == ["start", "sft", "ppo", "grpo", "rs", "dpo"]
    for name in ("ppo", "grpo", "rs"):
        assert right[name] > right["sft"] + 0.4
    held_out = {name: run["held_out"] for name, run in numbers["runs"].items()}
    assert held_out["sft"]["loss"]["after"] < held_out["sft"]["loss"]["before"]
    assert held_out["reward"]["pairs ranked right"]["after"] > 0.9
    assert held_out["dpo"]["margin"]["after"] > 0.1
    for name in held_out:
        assert f"results/tiny/{name}/" in (folder / "report.html").read_text()
