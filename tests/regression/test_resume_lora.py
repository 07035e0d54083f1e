"""A run with adapters that stops and goes on is the run that went through, to the bit."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from aligner.algorithms.ppo.trainer import train_ppo
from aligner.algorithms.supervised.build import train_sft
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import RunConfig, SFTRunConfig, load_config
from aligner.observe.metrics import read_metrics

CONF = Path(__file__).parents[2] / "conf"
RUNS = {
    "sft_tiny_cpu": (train_sft, SFTRunConfig, "sft", []),
    "ppo_tiny_cpu": (train_ppo, RunConfig, "ppo", ["trainer.ppo.initial_policy_kl_penalty=0.1"]),
}


def run(folder, nemo, recipe, steps):
    train, root, section, more = RUNS[recipe]
    settings = [
        f"model.restore_from_path={nemo}",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        f"trainer.{section}.max_steps={steps}",
        "model.optim.sched.max_steps=8",
        "model.peft.peft_scheme=lora",
        "model.peft.lora_tuning.adapter_dim=4",
        "model.peft.lora_tuning.adapter_dropout=0.1",
        *more,
    ]
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        train(load_config(compose(f"recipes/{recipe}", overrides=settings), root))


def numbers(folder):
    return [
        {key: value for key, value in line.items() if not key.startswith(("timers/", "val_"))}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize(
    "recipe", ["ppo_tiny_cpu", pytest.param("sft_tiny_cpu", marks=pytest.mark.extended)]
)
def test_a_resumed_run_is_the_run_that_went_through(tmp_path, tiny_nemo, recipe):
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    run(through, tiny_nemo, recipe, 4)
    run(stopped, tiny_nemo, recipe, 2)
    run(stopped, tiny_nemo, recipe, 4)
    assert repr(numbers(stopped)) == repr(numbers(through))  # repr: NaN equals itself
    beside = "policy.lora.safetensors"
    assert (stopped / beside).read_bytes() == (through / beside).read_bytes()
    with open_nemo(through / "policy.nemo") as one, open_nemo(stopped / "policy.nemo") as other:
        assert all(one.weights[name].equal(other.weights[name]) for name in one.weights)
