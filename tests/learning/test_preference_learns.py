"""The tiny recipes learn to tell right answers from far too large ones, on problems held out.

Against itself as the reference a model prefers nothing: margin 0, every pair a tie. (Without a
reference, SimPO begins with what the random model happens to prefer: 0.80 of these pairs.) A run
that learns nothing (learning rate about 0) stays there.
"""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from aligner.config import DPORunConfig, load_config
from aligner.observe.metrics import read_metrics

CONF = Path(__file__).parents[2] / "conf"
LOSSES = {"dpo": "dpo_tiny_cpu", "ipo": "dpo_tiny_cpu", "simpo": "dpo_tiny_cpu"}
LOSSES["kto"] = "kto_tiny_cpu"


def validations(folder, nemo, loss, *overrides):
    """What validation says before the first update and after the last."""
    from aligner.algorithms.preference.build import train_dpo

    updates = 15 if loss == "kto" else 10
    settings = [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "exp_manager.save_nemo=false",
        f"trainer.dpo.loss={loss}",
        f"trainer.dpo.max_steps={updates}",
        "trainer.dpo.save_interval=0",
        "trainer.dpo.val_check_interval=0",
        f"data.train.arguments.size={updates * (32 if loss == 'kto' else 16)}",
        *overrides,
    ]
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        tree = compose(f"recipes/{LOSSES[loss]}", overrides=settings)
    train_dpo(load_config(tree, DPORunConfig))
    lines = read_metrics(folder / "metrics.jsonl")
    return lines[0], lines[-1]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (2, 3))]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_right_answers_come_to_be_preferred(tmp_path, tiny_nemo, loss, seed):
    before, after = validations(tmp_path, tiny_nemo, loss, f"seed={seed}")
    assert before["val_optim/accuracy"] < 0.85
    assert after["val_optim/accuracy"] > 0.9
    assert after["val_optim/rewards_margin"] > before["val_optim/rewards_margin"] + 0.2
    assert after["val_optim/loss"] < before["val_optim/loss"]


def test_without_a_learning_rate_nothing_is_learned(tmp_path, tiny_nemo):
    _, after = validations(tmp_path, tiny_nemo, "dpo", "model.optim.lr=1e-12")
    assert after["val_optim/accuracy"] < 0.7
    assert abs(after["val_optim/rewards_margin"]) < 1e-4
