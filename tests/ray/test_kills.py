"""Workers that SIGKILL ends, in every phase: the run starts them anew, three times in a row, and
ends as if nothing had happened. Neither actors nor placement groups nor processes are left.
"""

import pytest
from runs import ON_RAY, Killer, train

from aligner.errors import WorkerDiedError

pytestmark = [pytest.mark.ray, pytest.mark.ray_heavy, pytest.mark.timeout(1800)]

# In which step the victim is killed while a role is called so: nothing is saved yet, a state is
# there, a state is being written.
MOMENTS = [
    *((1, "lm_policy", "generate"), (2, "lm_policy", "train")),
    (3, "lm_policy", "begin_saving"),
]


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, tiny_nemo, own_ray):
    return train(tmp_path_factory.mktemp("left_alone") / "run", tiny_nemo, ON_RAY)


@pytest.mark.parametrize("victim", ["lm_policy", "lm_value"])
def test_killed_in_every_phase(victim, tmp_path, tiny_nemo, left_alone, ray, monkeypatch, capfd):
    killer = Killer(monkeypatch, victim, MOMENTS)
    ended = train(tmp_path / "run", tiny_nemo, ON_RAY)
    assert killer.moments == []
    assert len(set(killer.killed)) == 3
    assert ended == left_alone
    told = capfd.readouterr().out
    for number, pid in enumerate(killer.killed, start=1):
        assert f"{victim} rank 0 (node" in told
        assert f"pid {pid}) died in" in told
        assert f"restart {number} of cluster.max_restarts=3" in told
    assert not list((tmp_path / "run" / "run_state").glob(".tmp*"))


def test_the_number_of_restarts_is_limited(tmp_path, tiny_nemo, ray, monkeypatch):
    killer = Killer(monkeypatch, "lm_policy", [(2, "lm_policy", "train")] * 9)
    with pytest.raises(WorkerDiedError, match="lm_policy rank 0"):
        train(tmp_path / "run", tiny_nemo, ON_RAY, "cluster.max_restarts=1")
    assert len(killer.killed) == 2
    states = sorted(path.name for path in (tmp_path / "run" / "run_state").iterdir())
    assert states == ["step_000001"]  # it can go on, with whatever was wrong put right
