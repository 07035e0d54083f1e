"""The small PPO run on Ray writes the local engine's numbers and weights, to the bit; the sets that
top-p kept travel from the engine to training, too. A reward model elsewhere gives the same rewards.
"""

import json
import re
import shutil
import sys

import pytest
from ranks import run_script
from recipes import ROOT
from runs import ON_RAY, go_back_to, result, settings, start, train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]
EXTEND = ROOT / "examples" / "extend"
SHORT = [
    "trainer.ppo.max_steps=2",
    "model.ppo.sampling_params.top_p=0.9",
    "model.ppo.record_kept_tokens=259",
]


@pytest.fixture(scope="module")
def local(tmp_path_factory, tiny_nemo):
    """The run on the local engine, as fresh a process as a worker: where it is, how it ended."""
    folder = tmp_path_factory.mktemp("local") / "run"
    script, name = ROOT / "examples" / "train_gpt_ppo.py", ("--config-name", "recipes/ppo_tiny_cpu")
    words = (*name, *settings(folder, tiny_nemo, *SHORT))
    run_script(script, *words, folder=folder.parent).check_returncode()
    return folder, result(folder)


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory, tiny_nemo, own_ray):
    folder = tmp_path_factory.mktemp("ray") / "run"
    return folder, train(folder, tiny_nemo, *SHORT, ON_RAY)


def test_ray_and_local_agree_to_the_bit(local, on_ray, ray):
    assert on_ray[1] == local[1]
    logs = {path.name for path in (on_ray[0] / "workers").iterdir()}
    assert logs == {"lm_policy-0.log", "lm_value-0.log"}


@pytest.mark.ray_heavy
@pytest.mark.parametrize("way", ["local to ray", "ray to local"])
def test_a_run_goes_on_on_the_other_engine(way, local, on_ray, ray, tmp_path, tiny_nemo):
    source = local if way == "local to ray" else on_ray
    engine = "ray" if way == "local to ray" else "local"
    folder = go_back_to(1, source[0], tmp_path / "run")
    ended = train(folder, tiny_nemo, *SHORT, f"cluster.engine={engine}")
    assert ended == local[1]


@pytest.mark.ray_heavy
def test_own_code_reaches_the_workers(local, ray, tmp_path, tiny_nemo, monkeypatch):
    """From the directory in which the driver was started, by module or by file."""
    for name in ("my_loss", "my_advantage", "my_callback"):
        shutil.copy(EXTEND / f"{name}.py", tmp_path / f"own_{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    numbers, weights = train(
        *(tmp_path / "run", tiny_nemo, *SHORT, ON_RAY),
        "model.ppo.loss=own_my_loss:ClippedLoss",
        "trainer.ppo.advantage.estimator=own_my_advantage.py:gae",
        "trainer.callbacks=[own_my_callback.py:Journal]",
    )
    assert weights == local[1][1]
    assert all("custom/outside_fraction" in line for line in numbers[1:])
    told = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").open()]
    assert [line["step"] for line in told if line["event"] == "step_end"] == [1, 2]


@pytest.mark.ray_heavy
def test_a_dry_run_counts_every_worker_and_leaves_nothing(on_ray, ray, tmp_path, tiny_nemo):
    folder = tmp_path / "run"
    done = start(folder, tiny_nemo, ON_RAY, "dry_run=true")
    said, complained = done.communicate(timeout=300)
    assert done.returncode == 0, complained
    assert list(tmp_path.iterdir()) == []
    row = next(
        line.split() for line in said.splitlines() if line.split()[:2] == ["policy", "train"]
    )
    both = re.search(r"fullest in \w+, \w+: ([\d.]+) of", said)
    assert float(both[1]) > 1.5 * float(row[2])  # the critic's process beside the policy's


@pytest.mark.ray_heavy
@pytest.mark.parametrize(
    ("place", "roles"),
    [
        ("reward.model.workers=1", {"policy", "value", "reward"}),
        ("reward.model.share_body_with_critic=true", {"policy", "value"}),
    ],
    ids=["workers of its own", "the critic's body"],
)
def test_a_reward_model_gives_the_local_runs_numbers(
    tmp_path, tiny_nemo, reward_nemo, ray, place, roles
):
    reward = ["reward=model", f"reward.model.restore_from_path={reward_nemo}"]
    steps = "trainer.ppo.max_steps=2"
    local = train(tmp_path / "local", tiny_nemo, *reward, steps)
    on_ray = train(tmp_path / "ray", tiny_nemo, *reward, steps, ON_RAY, place)
    assert local[0][1]["train_rollouts/rewards_std"] > 0.1  # there was something to compare
    assert on_ray == local
    logs = [path.name for path in (tmp_path / "ray" / "workers").iterdir()]
    assert len(logs) == len(roles)
    assert all(any(role in name for name in logs) for role in roles)
