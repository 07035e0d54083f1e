"""The tiny recipe brings the student near its teacher, on problems held out, offline and on-policy.

The teacher is random, wider, and decided about what comes next; the student begins by saying that
every token is about as likely, 2.15 nats from it. A run that learns nothing (learning rate about 0)
stays there.
"""

import pytest
from recipes import run

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (2, 3))]


def validations(folder, nemo, teacher, *overrides):
    """What validation says before the first update and after the last."""
    first, *_, last = run(
        *(folder, nemo, "distill_tiny_cpu", f"teacher.restore_from_path={teacher}"),
        *("exp_manager.save_nemo=false", "trainer.distill.max_steps=20"),
        *("trainer.distill.save_interval=0", "trainer.distill.val_check_interval=0"),
        *overrides,
    )
    return first, last


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", ["false", "true"])
def test_the_student_comes_near_its_teacher(tmp_path, tiny_nemo, teacher, on_policy, seed):
    options = [f"trainer.distill.on_policy={on_policy}", f"seed={seed}"]
    before, after = validations(tmp_path, tiny_nemo, teacher, *options)
    assert before["val_optim/forward_kl"] > 2
    assert after["val_optim/forward_kl"] < 1.7
    assert after["val_optim/topk_probability"] > before["val_optim/topk_probability"] + 0.05


@pytest.mark.parametrize("kl", ["mixed", pytest.param("backward", marks=pytest.mark.extended)])
def test_less_is_said_outside_of_the_top_k(tmp_path, tiny_nemo, teacher, kl):
    options = [f"trainer.distill.kl={kl}", "model.optim.lr=3.0e-3"]
    before, after = validations(tmp_path, tiny_nemo, teacher, *options)
    assert before["val_optim/topk_probability"] < 0.2
    assert after["val_optim/topk_probability"] > 0.35
    assert after["val_optim/loss"] < 0.75 * before["val_optim/loss"]
