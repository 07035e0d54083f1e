"""The DTensor backend writes megatron-core's metrics for every algorithm, step by step.

PPO's are compared number by number in `tests/distributed/test_dtensor_layouts`.
"""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from aligner.catalog import ALGORITHMS, imported
from aligner.config import load_config
from aligner.observe.metrics import read_metrics

CONF = Path(__file__).parents[2] / "conf"
# By recipe; DTensor has neither reward models nor distillation. KTO is one of DPO's losses.
CASES = {
    **{ALGORITHMS[name].recipe: ALGORITHMS[name] for name in ("reinforce", "rs", "sft", "dpo")},
    "kto_tiny_cpu": ALGORITHMS["dpo"],
}


def run(folder, nemo, recipe, backend):
    algorithm = CASES[recipe]
    loop = "ppo" if algorithm.name == "reinforce" else algorithm.name
    settings = [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "exp_manager.save_nemo=false",
        f"trainer.{loop}.max_steps=3",
        f"policy.backend={backend}",
    ]
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        tree = compose(f"recipes/{recipe}", overrides=settings)
    imported(algorithm.builder)(load_config(tree, algorithm.root_class))
    lines = [
        {name: value for name, value in line.items() if not name.startswith("timers/")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
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
