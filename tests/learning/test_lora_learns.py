"""Adapters alone learn a task: the recipes of other algorithms with everything else frozen.

The model's random weights are larger than the tiny model's, for what is frozen must be able to say
something: adapters cannot make output rows of length 0.16 likely.
"""

import pytest
import recipes
import torch

from aligner.checkpoint.adapters import MergedWeights, read_adapters
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights

LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.adapter_dim=8",
    "model.peft.lora_tuning.alpha=16",
    "model.optim.lr=1.0e-2",
]
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (2, 3))]


@pytest.fixture(scope="module")
def nemo(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "loud.nemo"
    weights = random_weights(TINY_ARCHITECTURE, scale=0.15)
    save_nemo(path, weights, TINY_ARCHITECTURE, byte_level_tokenizer().files())
    return path


def run(folder, nemo, recipe, *overrides):
    return recipes.run(folder, nemo, recipe, *LORA, *overrides)


def check_that_the_rest_is_frozen(folder, nemo):
    """The run's `.nemo` is the one it began with and its adapters, no more."""
    adapters = read_adapters(folder / "policy.lora.safetensors", TINY_ARCHITECTURE)
    with open_nemo(nemo) as base, open_nemo(folder / "policy.nemo") as trained:
        merged = MergedWeights(base.weights, adapters)
        assert set(merged) == set(trained.weights)
        assert all(torch.equal(merged[name], trained.weights[name]) for name in merged)


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_loss_falls(tmp_path, nemo, seed):
    lines = run(tmp_path, nemo, "sft_tiny_cpu", f"seed={seed}")
    assert lines[0]["val_optim/loss"] > 5
    assert lines[-1]["val_optim/loss"] < 2.5
    check_that_the_rest_is_frozen(tmp_path, nemo)


@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("ppo_tiny_cpu", []),
        # Few responses are right at first: smaller groups than these hold none.
        ("grpo_tiny_cpu", ["model.ppo.num_rollouts_per_prompt=32", "trainer.ppo.max_steps=40"]),
    ],
    ids=["ppo", "grpo"],
)
def test_the_rewarded_token_is_learned(tmp_path, nemo, recipe, overrides, seed):
    kl = "trainer.ppo.initial_policy_kl_penalty=0.001"
    lines = run(tmp_path, nemo, recipe, f"seed={seed}", kl, *overrides)
    assert lines[0]["val_rollouts/accuracy"] < 0.2
    assert lines[-1]["val_rollouts/accuracy"] > 0.8
    assert lines[1]["train_rollouts/init_policy_kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[-1]["train_rollouts/init_policy_kl"] > 0.1
    check_that_the_rest_is_frozen(tmp_path, nemo)
