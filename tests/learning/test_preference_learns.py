"""The tiny recipes learn to tell right answers from far too large ones, on problems held out.

Against itself as the reference a model prefers nothing: margin 0, every pair a tie. (Without a
reference, SimPO begins with what the random model happens to prefer: 0.80 of these pairs.) A run
that learns nothing (learning rate about 0) stays there.
"""

import pytest
from recipes import run
from variants import extended_except

LOSSES = {"dpo": "dpo_tiny_cpu", "ipo": "dpo_tiny_cpu", "simpo": "dpo_tiny_cpu"}
LOSSES["kto"] = "kto_tiny_cpu"


def validations(folder, nemo, loss, *overrides):
    """What validation says before the first update and after the last."""
    updates = 15 if loss == "kto" else 10
    first, *_, last = run(
        *(folder, nemo, LOSSES[loss], "exp_manager.save_nemo=false", f"trainer.dpo.loss={loss}"),
        *(f"trainer.dpo.max_steps={updates}", "trainer.dpo.save_interval=0"),
        "trainer.dpo.val_check_interval=0",
        f"data.train.arguments.size={updates * (32 if loss == 'kto' else 16)}",
        *overrides,
    )
    return first, last


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (2, 3))]
)
@pytest.mark.parametrize("loss", extended_except(("dpo", "simpo", "kto"), LOSSES))
def test_right_answers_come_to_be_preferred(tmp_path, tiny_nemo, loss, seed):
    before, after = validations(tmp_path, tiny_nemo, loss, f"seed={seed}")
    assert before["val_optim/accuracy"] < 0.85
    assert after["val_optim/accuracy"] > 0.9
    assert after["val_optim/rewards_margin"] > before["val_optim/rewards_margin"] + 0.2
    assert after["val_optim/loss"] < before["val_optim/loss"]
