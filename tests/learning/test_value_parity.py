"""Whole runs of the tiny recipe on both backends report the same, step by step.

Whole curves over three seeds, and what leaving out the right shift costs: benchmarks/value_parity.
"""

import pytest
import recipes


def metrics(folder, nemo, backend, *overrides):
    options = [f"policy.backend={backend}", "trainer.ppo.save_interval=2", *overrides]
    return recipes.run(folder, nemo, "ppo_tiny_cpu", *options)


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
