"""GRPO and PPO of models that only transformers builds: rewards rise, stopped runs continue."""

import sys
from pathlib import Path

import pytest
from recipes import numbers, run
from safetensors.torch import load_file

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tiny_transformers import tiny_model

TYPES = ("gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "olmo2", "mamba2", "phi")
LORA = (
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.adapter_dim=8",
    "model.peft.lora_tuning.alpha=16",
    "model.optim.lr=1.0e-2",
)
RUNS = [
    ("gemma3_text", "grpo_tiny_cpu"),
    *(
        pytest.param(model_type, recipe, marks=pytest.mark.extended)
        for model_type in TYPES
        for recipe in ("grpo_tiny_cpu", "ppo_tiny_cpu")
        if (model_type, recipe) != ("gemma3_text", "grpo_tiny_cpu")
    ),
]


@pytest.fixture
def folder_of(tmp_path):
    def write(model_type, scale=0.02):
        tokenizer, folder = byte_level_tokenizer(), tmp_path / model_type
        sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 512}
        tiny_model(model_type, **sizes, initializer_range=scale).save_pretrained(folder)
        for name, content in tokenizer.files().items():
            (folder / name).write_bytes(content)
        return folder

    return write


def trained(folder, model, recipe, steps, *overrides):
    options = ["policy.backend=dtensor", f"trainer.ppo.max_steps={steps}"]
    return run(folder, model, recipe, *options, *overrides)


@pytest.mark.parametrize(("model_type", "recipe"), RUNS)
def test_the_reward_rises(model_type, recipe, folder_of, tmp_path):
    check_that_it_rises(trained(tmp_path / "run", folder_of(model_type), recipe, 20))


@pytest.mark.extended
@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_the_reward_rises_with_megatron(model_type, folder_of, tmp_path):
    model = folder_of(model_type)
    check_that_it_rises(run(tmp_path / "run", model, "ppo_tiny_cpu", "trainer.ppo.max_steps=20"))


def check_that_it_rises(lines):
    rewards = [line["train_rollouts/rewards"] for line in lines[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards


@pytest.mark.extended
def test_the_reward_rises_with_adapters(folder_of, tmp_path):
    """Larger weights than in other tests, because the output layer is frozen."""
    model = folder_of("gpt_oss", scale=0.125)
    check_that_it_rises(trained(tmp_path / "run", model, "grpo_tiny_cpu", 20, *LORA))


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gemma3_text", ()),
        pytest.param("gpt_oss", (), marks=pytest.mark.extended),
        pytest.param("qwen3_next", (), marks=pytest.mark.extended),
        pytest.param("mixtral", LORA, marks=pytest.mark.extended),
    ],
)
def test_a_stopped_run_continues_to_the_bit(model_type, options, folder_of, tmp_path):
    model = folder_of(model_type)
    options = ("trainer.ppo.save_interval=1", *options)
    trained(tmp_path / "through", model, "ppo_tiny_cpu", 3, *options)
    for steps in (1, 3):
        trained(tmp_path / "stopped", model, "ppo_tiny_cpu", steps, *options)

    assert numbers(tmp_path / "stopped", "val") == numbers(tmp_path / "through", "val")
    one, other = (
        load_file(tmp_path / name / "policy" / "model.safetensors")
        for name in ("through", "stopped")
    )
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert not list((tmp_path / "stopped").glob(".*.earlier"))
