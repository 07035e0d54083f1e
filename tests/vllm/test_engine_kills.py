"""A vLLM engine that SIGKILL ends: the run starts all workers anew, pushes the weights again and
ends with the uninterrupted run's numbers. No process and no shared memory is left. Conversations of
an engine that fails in the middle of a batch begin again.
"""

import os
from pathlib import Path

import psutil
import pytest
from runs import ON_RAY, Killer, train
from vllm_roles import ROOT

from aligner.generation.vllm import generation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
VLLM = [
    ON_RAY,
    "generation.backend=vllm",
    f"generation.vllm.python={ROOT}/.venv-vllm/bin/python",
    "generation.vllm.kv_cache_mb=128",
    "generation.vllm.threads=1",
]
AHEAD = ["generation.async_rollouts=true", "model.ppo.truncated_importance_sampling=2.0"]
MOMENTS = [  # step, and the call that is under way
    (1, "vllm", "start_generation"),
    (2, "vllm", "load_weights_from_ipc"),
    (3, "lm_policy", "train"),
]


def engines():
    """Processes of the engines' interpreter."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(".venv-vllm" in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def test_killed_while_drawing_loading_and_idle(tmp_path, fresh_nemo, ray, monkeypatch, capfd):
    before = engines()
    left_alone = train(tmp_path / "left_alone", fresh_nemo, *VLLM)
    killer = Killer(monkeypatch, "vllm", MOMENTS)
    ended = train(tmp_path / "run", fresh_nemo, *VLLM)
    assert killer.moments == []
    told = capfd.readouterr().out
    for number, pid in enumerate(killer.killed):
        assert f"pid {pid}) died in" in told
        assert f"restart {number + 1} of cluster.max_restarts=3" in told
    assert ended == left_alone
    assert engines() == before


@pytest.mark.parametrize("in_flight", ["finish", "abandon"])
def test_killed_while_it_draws_ahead(in_flight, tmp_path, fresh_nemo, ray, monkeypatch):
    way = [*VLLM, *AHEAD, f"generation.in_flight={in_flight}"]
    left_alone = train(tmp_path / "left_alone", fresh_nemo, *way)
    killer = Killer(monkeypatch, "vllm", [(2, "lm_policy", "train")])
    ended = train(tmp_path / "run", fresh_nemo, *way)
    assert len(killer.killed) == 1
    assert ended == left_alone


def test_a_run_ends_as_one_whose_engine_never_failed(tmp_path, fresh_nemo, ray, monkeypatch):
    options = ["environment.concurrency=4", "environment.retries=1", "trainer.ppo.max_steps=1"]

    def run(name):
        game = {"recipe": "ppo_tiny_guessing_cpu"}
        numbers, weights = train(tmp_path / name, fresh_nemo, *VLLM, *options, **game)
        names = [f"{kind}_rollouts/failed_engine_error" for kind in ("train", "val")]
        failed = sum(line.pop(name, 0) for line in numbers for name in names)
        return failed, numbers, weights

    calm = run("calm")
    # Engines import it from here.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(generation, "WORKER", "failing_engine.FailingWorker")
    shaken = run("shaken")
    assert (calm[0], shaken[0] > 0) == (0, True)
    assert shaken[1:] == calm[1:]
