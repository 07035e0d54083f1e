"""The driver is killed or told to stop, in any phase: nothing of its Ray is left, and the same
command goes on and ends with the uninterrupted run's numbers.

1. SIGKILL of a driver that started Ray: Ray's processes and their folder are gone.
2. SIGKILL of a driver that joined a cluster: its actors and placement groups are gone.
3. SIGTERM: the step is finished and saved, the exit is clean.
4. Under torchrun's environment the engine is refused.
5. SIGKILL of workers, in every phase: the run starts them anew, three times in a row, and ends as
   if nothing had happened.
"""

import os
import signal
from pathlib import Path

import pytest
from leftovers import (
    living_actors,
    processes_of,
    reserved_groups,
    session_folder,
    shared_memory,
    wait_for,
)
from recipes import numbers
from runs import ON_RAY, Killer, finished, result, start, train

from aligner.errors import ConfigError, WorkerDiedError

pytestmark = [pytest.mark.ray, pytest.mark.ray_heavy, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
PATIENCE_S = 600
# In which step the victim is killed while a role is called so: nothing is saved yet, a state is
# there, a state is being written.
MOMENTS = [
    *((1, "lm_policy", "generate"), (2, "lm_policy", "train")),
    (3, "lm_policy", "begin_saving"),
]


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, tiny_nemo):
    """By the local engine, whose numbers are Ray's."""
    return train(tmp_path_factory.mktemp("left_alone") / "run", tiny_nemo)


@pytest.fixture
def launch():
    """Starts drivers; none outlives the test."""
    drivers = []

    def begin(*arguments, **options):
        drivers.append(start(*arguments, **options))
        return drivers[-1]

    yield begin
    for driver in drivers:
        if driver.poll() is None:
            driver.kill()
            driver.wait()


def test_a_killed_driver_of_a_cluster(tmp_path, tiny_nemo, left_alone, ray, launch):
    """It kills itself while a call is under way, once in each phase (see `dying_driver`)."""
    folder = tmp_path / "run"
    joined = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    path = os.pathsep.join([str(HERE.parent), joined["PYTHONPATH"]])
    script = HERE / "dying_driver.py"
    for phase in ("1 generate", "2 train", "3 begin_saving"):
        dying = {**joined, "PYTHONPATH": path, "ALIGNER_TEST_DIE_IN": phase}
        driver = launch(folder, tiny_nemo, ON_RAY, environment=dying, script=script)
        output, _ = driver.communicate(timeout=PATIENCE_S)
        assert driver.returncode == -signal.SIGKILL, output
        assert living_actors() == []
        assert reserved_groups() == []
    output = finished(launch(folder, tiny_nemo, ON_RAY, environment=joined))
    assert "resumed after step 2" in " ".join(output.split())
    assert result(folder) == left_alone


def steps_made(folder):
    return len(numbers(folder)) - 1 if (folder / "metrics.jsonl").exists() else -1


def test_a_killed_driver_with_a_ray_of_its_own(tmp_path, tiny_nemo, left_alone, launch):
    memory, folder = shared_memory(), tmp_path / "run"
    driver = launch(folder, tiny_nemo, ON_RAY)
    wait_for(lambda: steps_made(folder) >= 1 or driver.poll() is not None, PATIENCE_S, "a step")
    session = session_folder(driver.pid)
    assert processes_of(session)
    driver.kill()
    driver.communicate(timeout=PATIENCE_S)
    wait_for(lambda: not processes_of(session), 60, f"processes of {session} end")
    wait_for(lambda: not Path(session).exists(), 60, f"{session} is removed")
    assert shared_memory() <= memory
    finished(launch(folder, tiny_nemo, ON_RAY))
    assert result(folder) == left_alone


def test_sigterm_saves_and_leaves_nothing(tmp_path, tiny_nemo, left_alone, launch):
    folder = tmp_path / "run"
    driver = launch(folder, tiny_nemo, ON_RAY)
    wait_for(lambda: steps_made(folder) >= 0 or driver.poll() is not None, PATIENCE_S, "a line")
    session = session_folder(driver.pid)
    driver.terminate()
    assert "the same command continues" in " ".join(finished(driver).split())
    assert processes_of(session) == []
    assert not Path(session).exists()
    assert steps_made(folder) in (1, 2)
    finished(launch(folder, tiny_nemo, "cluster.engine=local"))
    assert result(folder) == left_alone


def test_torchrun_and_ray_exclude_each_other(tmp_path, tiny_nemo, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"cluster\.engine=ray .* without torchrun"):
        train(tmp_path / "run", tiny_nemo, ON_RAY)


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
