"""A run that stops and goes on is the run that went through, to the bit, whatever it learns by."""

import importlib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from aligner.checkpoint.nemo import open_nemo
from aligner.config import (
    DistillRunConfig,
    RewardRunConfig,
    RSRunConfig,
    RunConfig,
    SFTRunConfig,
    load_config,
)
from aligner.observe.metrics import read_metrics

CONF = Path(__file__).parents[2] / "conf"
RUNS = {
    "grpo_tiny_cpu": ("build", "train_ppo", RunConfig, "ppo"),
    "rs_tiny_cpu": ("build_rs", "train_rs", RSRunConfig, "rs"),
    "sft_tiny_cpu": ("build_supervised", "train_sft", SFTRunConfig, "sft"),
    "distill_tiny_cpu": ("build_distill", "train_distill", DistillRunConfig, "distill"),
    "reward_tiny_cpu": (
        "build_reward_model",
        "train_reward_model",
        RewardRunConfig,
        "reward_model",
    ),
}


OPTIONS = {"distill_tiny_cpu": ["trainer.distill.on_policy=true"]}  # so that sampling resumes too


def run(folder, nemo, teacher, recipe, steps):
    module, function, root, section = RUNS[recipe]
    settings = [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        f"trainer.{section}.max_steps={steps}",
        # Counted in steps of the whole run, so that both runs have the same schedule.
        "model.optim.sched.name=linear",
        "model.optim.sched.max_steps=8",
        "data.validation.arguments.size=16",
        *OPTIONS.get(recipe, []),
    ]
    if recipe == "distill_tiny_cpu":
        settings.append(f"teacher.restore_from_path={teacher}")
    train = getattr(importlib.import_module(f"aligner.algorithms.{module}"), function)
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        train(load_config(compose(f"recipes/{recipe}", overrides=settings), root))


def numbers(folder):
    """What every step wrote, times and the validation of a run's last step aside."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("timers/", "val_"))}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize("recipe", RUNS)
def test_a_resumed_run_is_the_run_that_went_through(tmp_path, tiny_nemo, teacher, recipe):
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    run(through, tiny_nemo, teacher, recipe, 4)
    run(stopped, tiny_nemo, teacher, recipe, 2)
    run(stopped, tiny_nemo, teacher, recipe, 4)
    assert repr(numbers(stopped)) == repr(numbers(through))  # repr: NaN equals itself
    (trained,) = through.glob("*.nemo")
    with open_nemo(trained) as one, open_nemo(stopped / trained.name) as other:
        assert set(one.weights) == set(other.weights)
        assert all(one.weights[name].equal(other.weights[name]) for name in one.weights)
        assert one.config == other.config  # with the measured standardisation of a reward model
