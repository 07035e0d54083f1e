"""Workers that SIGKILL ends, in every phase: the run starts them anew, three times in a row, and
ends as if nothing had happened. Neither actors nor placement groups nor processes are left.
"""

import os
import signal

import pytest
from runs import ON_RAY, train

from aligner.distributed.worker_groups import RayWorkerGroup
from aligner.errors import WorkerDiedError, current_step

pytestmark = [pytest.mark.ray, pytest.mark.ray_heavy, pytest.mark.timeout(1800)]

# In which step the victim is killed while the policy is called so: nothing is saved yet, a state is
# there, a state is being written.
PHASES = [(1, "generate"), (2, "train"), (3, "begin_saving")]


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, tiny_nemo, own_ray):
    return train(tmp_path_factory.mktemp("left_alone") / "run", tiny_nemo, ON_RAY)


class Killer:
    """Kills the first worker of ``victim`` once in each phase, with the call under way."""

    def __init__(self, monkeypatch, victim, phases):
        self.victim, self.phases = victim, list(phases)
        self.seats, self.killed, self.step = {}, [], 0
        start_call, real_start = RayWorkerGroup._start_call, RayWorkerGroup._start_workers

        def start(group, *arguments):
            self.seats[group.name_prefix] = group._seats[0]
            real_start(group, *arguments)

        def call(group, method_name, *arguments):
            future = start_call(group, method_name, *arguments)
            self.step = current_step() or self.step  # a state is saved after its step
            if group.name_prefix == "lm_policy" and (self.step, method_name) in self.phases[:1]:
                del self.phases[0]
                self.killed.append(self.seats[victim].pid)
                os.kill(self.killed[-1], signal.SIGKILL)
            return future

        monkeypatch.setattr(RayWorkerGroup, "_start_call", call)
        monkeypatch.setattr(RayWorkerGroup, "_start_workers", start)


@pytest.mark.parametrize("victim", ["lm_policy", "lm_value"])
def test_killed_in_every_phase(victim, tmp_path, tiny_nemo, left_alone, ray, monkeypatch, capfd):
    killer = Killer(monkeypatch, victim, PHASES)
    ended = train(tmp_path / "run", tiny_nemo, ON_RAY)
    assert killer.phases == []
    assert len(set(killer.killed)) == 3
    assert ended == left_alone
    told = capfd.readouterr().out
    for number, pid in enumerate(killer.killed, start=1):
        assert f"{victim} rank 0 (node" in told
        assert f"pid {pid}) died in" in told
        assert f"restart {number} of cluster.max_restarts=3" in told
    assert not list((tmp_path / "run" / "run_state").glob(".tmp*"))


def test_the_number_of_restarts_is_limited(tmp_path, tiny_nemo, ray, monkeypatch):
    killer = Killer(monkeypatch, "lm_policy", [(2, "train")] * 9)
    with pytest.raises(WorkerDiedError, match="lm_policy rank 0"):
        train(tmp_path / "run", tiny_nemo, ON_RAY, "cluster.max_restarts=1")
    assert len(killer.killed) == 2
    states = sorted(path.name for path in (tmp_path / "run" / "run_state").iterdir())
    assert states == ["step_000001"]  # it can go on, with whatever was wrong put right
