"""Whole runs of the tiny recipe on both backends report the same, step by step.

Whole curves over three seeds, and what leaving out the right shift costs: benchmarks/value_parity.
"""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from aligner.config import load_config
from aligner.observe.metrics import read_metrics

CONF = Path(__file__).parents[2] / "conf"


def metrics(folder, nemo, backend, *overrides):
    from aligner.algorithms.ppo.trainer import train_ppo

    settings = [
        f"model.restore_from_path={nemo}",
        f"policy.backend={backend}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "trainer.ppo.save_interval=2",
        *overrides,
    ]
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        train_ppo(load_config(compose("recipes/ppo_tiny_cpu", overrides=settings)))
    return read_metrics(folder / "metrics.jsonl")


def assert_same(one, other):
    assert len(one) == len(other)
    for expected, actual in zip(one, other, strict=True):
        assert expected.keys() == actual.keys()
        for key, value in expected.items():
            if isinstance(value, int | float) and not key.startswith("timers/"):
                expected_value = pytest.approx(value, rel=1e-4, abs=1e-4, nan_ok=True)
                assert actual[key] == expected_value, key


def test_backends_report_the_same_and_a_run_resumes(tmp_path, tiny_nemo):
    steps = "trainer.ppo.max_steps=3"
    megatron = metrics(tmp_path / "megatron", tiny_nemo, "megatron", steps)
    dtensor = metrics(tmp_path / "dtensor", tiny_nemo, "dtensor", steps)
    assert_same(megatron, dtensor)
    begun = metrics(tmp_path / "resumed", tiny_nemo, "dtensor", "trainer.ppo.max_steps=2")
    resumed = metrics(tmp_path / "resumed", tiny_nemo, "dtensor", steps)
    assert len(resumed) == len(begun) + 1
    assert resumed[-1]["train_optim/loss"] == dtensor[-1]["train_optim/loss"]
