"""The DTensor backend writes megatron-core's metrics for every algorithm, step by step.

PPO's are compared number by number in `tests/distributed/test_dtensor_layouts`.
"""

import pytest
from recipes import numbers, run_steps

# DTensor has neither reward models nor distillation. KTO is one of DPO's losses.
CASES = ("grpo_tiny_cpu", "rs_tiny_cpu", "sft_tiny_cpu", "dpo_tiny_cpu", "kto_tiny_cpu")


def run(folder, nemo, recipe, backend):
    run_steps(folder, nemo, recipe, 3, "exp_manager.save_nemo=false", f"policy.backend={backend}")
    lines = numbers(folder)
    # Before the first update all pairs are ties: rounding says which side of 0 they are on.
    lines[1].pop("train_optim/accuracy", None)
    return lines


@pytest.mark.extended
@pytest.mark.parametrize("recipe", CASES)
def test_backends_write_the_same_metrics(tmp_path, tiny_nemo, recipe):
    megatron, dtensor = (
        run(tmp_path / backend, tiny_nemo, recipe, backend) for backend in ("megatron", "dtensor")
    )
    assert len(megatron) > 2
    for line, other in zip(megatron, dtensor, strict=True):
        assert other == pytest.approx(line, rel=2e-4, abs=2e-5, nan_ok=True)
