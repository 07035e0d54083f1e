"""Conversations of a real vLLM engine that fails in the middle of a batch begin again."""

import os
from pathlib import Path

import pytest
from runs import train
from test_engine_kills import VLLM

from aligner.generation.vllm import generation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
OPTIONS = [
    *VLLM,
    *("environment.concurrency=4", "environment.retries=1", "trainer.ppo.max_steps=1"),
]
FAILED = "rollouts/failed_engine_error"


def test_the_run_ends_as_one_whose_engine_never_failed(tmp_path, fresh_nemo, ray, monkeypatch):
    def run(name):
        numbers, weights = train(
            tmp_path / name, fresh_nemo, *OPTIONS, recipe="ppo_tiny_guessing_cpu"
        )
        failed = sum(
            line.pop(f"{kind}_{FAILED}", 0) for line in numbers for kind in ("train", "val")
        )
        return failed, numbers, weights

    calm = run("calm")
    # Engines import it from here.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(generation, "WORKER", "failing_engine.FailingWorker")
    shaken = run("shaken")
    assert (calm[0], shaken[0] > 0) == (0, True)
    assert shaken[1:] == calm[1:]
