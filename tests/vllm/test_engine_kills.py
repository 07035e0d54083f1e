"""A vLLM engine that SIGKILL ends: the run starts all workers anew, pushes the weights again and
ends with the uninterrupted run's numbers. No process and no shared memory is left.
"""

import psutil
import pytest
from runs import ON_RAY, train
from test_kills import Killer
from vllm_roles import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
VLLM = [
    ON_RAY,
    "generation.backend=vllm",
    f"generation.vllm.python={ROOT}/.venv-vllm/bin/python",
    "generation.vllm.kv_cache_mb=128",
    "generation.vllm.threads=1",
]
AHEAD = ["generation.async_rollouts=true", "model.ppo.truncated_importance_sampling=2.0"]
PHASES = {  # the call that is under way, and whose it is
    "drawing": ("vllm", "generate"),
    "refit": ("vllm", "load_weights_from_ipc"),
    "training": ("lm_policy", "train"),
}


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, fresh_nemo, own_ray):
    return train(tmp_path_factory.mktemp("left_alone") / "run", fresh_nemo, *VLLM)


def engines():
    """Processes of the engines' interpreter; a child of the engine would be one, too."""
    return [
        process.pid
        for process in psutil.process_iter(["environ"])
        if str(ROOT / ".venv-vllm") in (process.info["environ"] or {}).get("VIRTUAL_ENV", "")
        or any(".venv-vllm" in word for word in _words(process))
    ]


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_engine(phase, tmp_path, fresh_nemo, left_alone, ray, monkeypatch, capfd):
    before = engines()
    killer = Killer(monkeypatch, "vllm", *PHASES[phase])
    ended = train(tmp_path / "run", fresh_nemo, *VLLM)
    assert len(killer.killed) == 1
    told = capfd.readouterr().out
    assert "vllm rank 0 (node" in told
    assert f"pid {killer.killed[0]}) died in" in told
    assert ended == left_alone
    assert engines() == before


@pytest.mark.parametrize("in_flight", ["finish", "abandon"])
def test_an_engine_killed_while_it_draws_ahead(in_flight, tmp_path, fresh_nemo, ray, monkeypatch):
    way = [*VLLM, *AHEAD, f"generation.in_flight={in_flight}"]
    left_alone = train(tmp_path / "left_alone", fresh_nemo, *way)
    killer = Killer(monkeypatch, "vllm", "lm_policy", "train")
    ended = train(tmp_path / "run", fresh_nemo, *way)
    assert len(killer.killed) == 1
    assert ended == left_alone
