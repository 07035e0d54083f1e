"""GRPO and PPO of models that only transformers builds: rewards rise, stopped runs continue."""

import pytest
from recipes import numbers, run
from safetensors.torch import load_file
from test_algorithms_learn import LORA
from tiny_transformers import tiny_model
from variants import extended_except

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer

TYPES = ("gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "olmo2", "mamba2", "phi")
TASKS = ("grpo_tiny_cpu", "ppo_tiny_cpu")
OFTEN = ("gemma3_text", "grpo_tiny_cpu", "dtensor")
RUNS = [
    OFTEN,
    *((kind, recipe, "dtensor") for kind in TYPES for recipe in TASKS),
    *((kind, "ppo_tiny_cpu", "megatron") for kind in ("glm4_moe", "deepseek_v3")),
    ("gpt_oss", "grpo_tiny_cpu", "adapters"),
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


@pytest.mark.parametrize("case", extended_except([OFTEN], dict.fromkeys(RUNS)))
def test_the_reward_rises(case, folder_of, tmp_path):
    """With adapters of larger weights, because the output layer is frozen."""
    model_type, recipe, way = case
    ways = {"megatron": ["policy.backend=megatron"], "adapters": LORA}
    model = folder_of(model_type, scale=0.125 if way == "adapters" else 0.02)
    lines = trained(tmp_path / "run", model, recipe, 20, *ways.get(way, []))
    rewards = [line["train_rollouts/rewards"] for line in lines[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards


@pytest.mark.parametrize(
    "model_type",
    extended_except(["gemma3_text"], ["gemma3_text", "gpt_oss", "qwen3_next", "mixtral"]),
)
def test_a_stopped_run_continues_to_the_bit(model_type, folder_of, tmp_path):
    model = folder_of(model_type)
    options = ["trainer.ppo.save_interval=1", *(LORA if model_type == "mixtral" else ())]
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
