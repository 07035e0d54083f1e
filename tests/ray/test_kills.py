"""A worker that SIGKILL ends, in whatever phase: the run starts it anew and ends as if nothing
had happened. Neither actors nor placement groups nor processes are left.

Each case kills one process once, while the named call is under way in the second step.
"""

import os
import signal

import pytest
from runs import ON_RAY, STEPS, train

from aligner.distributed.ray_worker_group import RayWorkerGroup
from aligner.errors import WorkerDiedError
from aligner.observe.nonfinite import current_step

pytestmark = [pytest.mark.ray, pytest.mark.ray_heavy, pytest.mark.timeout(1200)]

PHASES = {  # the call that is under way, and whose it is
    "generation": ("lm_policy", "generate"),
    "training": ("lm_policy", "train"),
    "saving": ("lm_policy", "save_state"),
}


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, tiny_nemo, own_ray):
    return train(tmp_path_factory.mktemp("left_alone") / "run", tiny_nemo, ON_RAY)


class Killer:
    """Kills the process of ``victim`` when ``role`` is called by ``method`` in step 2."""

    def __init__(self, monkeypatch, victim, role, method, times=1):
        self.victim, self.role, self.method, self.times = victim, role, method, times
        self.groups, self.killed, self.saves = {}, [], 0
        real_call = RayWorkerGroup._call

        def call(group, rank, method_name, *arguments):
            answer = real_call(group, rank, method_name, *arguments)
            self.groups[group.name_prefix] = group
            self.look(group, method_name)
            return answer

        monkeypatch.setattr(RayWorkerGroup, "_call", call)

    def look(self, group, method_name):
        if (group.name_prefix, method_name) != (self.role, self.method):
            return
        self.saves += method_name == "save_state"  # made after its step
        if (current_step() == 2 or self.saves == 2) and len(self.killed) < self.times:
            pid = self.groups[self.victim]._seats[0].pid
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["lm_policy", "lm_value"])
def test_a_killed_worker(victim, phase, tmp_path, tiny_nemo, left_alone, ray, monkeypatch, capfd):
    killer = Killer(monkeypatch, victim, *PHASES[phase])
    ended = train(tmp_path / "run", tiny_nemo, ON_RAY)
    assert len(killer.killed) == 1
    assert ended == left_alone
    told = capfd.readouterr().out
    assert f"{victim} rank 0 (node" in told
    assert f"pid {killer.killed[0]}) died in" in told
    assert "restart 1 of cluster.max_restarts=3" in told
    assert not list((tmp_path / "run" / "run_state").glob(".tmp*"))


def test_the_number_of_restarts_is_limited(tmp_path, tiny_nemo, ray, monkeypatch):
    killer = Killer(monkeypatch, "lm_policy", "lm_policy", "train", times=9)
    with pytest.raises(WorkerDiedError, match="lm_policy rank 0"):
        train(tmp_path / "run", tiny_nemo, ON_RAY, "cluster.max_restarts=1")
    assert len(killer.killed) == 2
    states = sorted(path.name for path in (tmp_path / "run" / "run_state").iterdir())
    assert states == ["step_000001"]  # it can go on, with whatever was wrong put right
    assert STEPS > 2
