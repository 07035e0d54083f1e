"""The DTensor backend writes megatron-core's metrics for every algorithm, step by step.

Layouts are compared number by number in `tests/distributed/test_dtensor_layouts`. Whole curves of
PPO over three seeds, and what leaving out the right shift costs: benchmarks/value_parity.
"""

import pytest
from recipes import near, numbers, run_steps
from variants import extended_except

# DTensor has neither reward models nor distillation. KTO is one of DPO's losses.
CASES = ("ppo", "grpo", "rs", "sft", "dpo", "kto")


def run(folder, nemo, recipe, backend):
    run_steps(folder, nemo, recipe, 3, "exp_manager.save_nemo=false", f"policy.backend={backend}")
    lines = numbers(folder)
    # Before the first update all pairs are ties: rounding says which side of 0 they are on.
    lines[1].pop("train_optim/accuracy", None)
    return lines


@pytest.mark.parametrize("name", extended_except(("ppo",), CASES))
def test_backends_write_the_same_metrics(tmp_path, tiny_nemo, name):
    megatron, dtensor = (
        run(tmp_path / backend, tiny_nemo, f"{name}_tiny_cpu", backend)
        for backend in ("megatron", "dtensor")
    )
    assert len(megatron) > 2
    for line, other in zip(megatron, dtensor, strict=True):
        assert other == near(line)
