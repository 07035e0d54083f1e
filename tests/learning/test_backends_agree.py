"""The DTensor backend writes megatron-core's metrics for every algorithm, step by step.

PPO's are compared number by number in `tests/distributed/test_dtensor_layouts`.
"""

import importlib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from aligner.config import DPORunConfig, RSRunConfig, RunConfig, SFTRunConfig, load_config
from aligner.observe.metrics import read_metrics

CONF = Path(__file__).parents[2] / "conf"
# recipe, its configuration, what trains it, its loop's section
CASES = [
    ("grpo_tiny_cpu", RunConfig, "build:train_ppo", "ppo"),
    ("rs_tiny_cpu", RSRunConfig, "build_rs:train_rs", "rs"),
    ("sft_tiny_cpu", SFTRunConfig, "build_supervised:train_sft", "sft"),
    ("dpo_tiny_cpu", DPORunConfig, "build_preference:train_dpo", "dpo"),
    ("kto_tiny_cpu", DPORunConfig, "build_preference:train_dpo", "dpo"),
]


def run(folder, nemo, recipe, root, train, loop, backend):
    settings = [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "exp_manager.save_nemo=false",
        f"trainer.{loop}.max_steps=3",
        f"policy.backend={backend}",
    ]
    module, _, function = train.partition(":")
    start = getattr(importlib.import_module(f"aligner.algorithms.{module}"), function)
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        start(load_config(compose(f"recipes/{recipe}", overrides=settings), root))
    lines = [
        {name: value for name, value in line.items() if not name.startswith("timers/")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
    # Before the first update all pairs are ties: rounding says which side of 0 they are on.
    lines[1].pop("train_optim/accuracy", None)
    return lines


@pytest.mark.extended
@pytest.mark.parametrize(
    ("recipe", "root", "train", "loop"), CASES, ids=[recipe for recipe, *_ in CASES]
)
def test_backends_write_the_same_metrics(tmp_path, tiny_nemo, recipe, root, train, loop):
    megatron, dtensor = (
        run(tmp_path / backend, tiny_nemo, recipe, root, train, loop, backend)
        for backend in ("megatron", "dtensor")
    )
    assert len(megatron) > 2
    for line, other in zip(megatron, dtensor, strict=True):
        assert other == pytest.approx(line, rel=2e-4, abs=2e-5, nan_ok=True)
