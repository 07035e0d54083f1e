"""Models of transformers on two processes, data or tensor parallel, learn as on one."""

import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tiny_transformers import model_types, tiny_model

pytestmark = pytest.mark.integration

# zamba shares layers. With adapters, weights are trained beside frozen ones.
SOME = ["gemma3_text", "gemma3_text+reward", "deepseek_v3", "mamba2", "zamba", "mixtral+lora"]
OTHERS = [kind for kind in model_types() if kind not in (*SOME, "modernbert-decoder")]
GROUPS = [OTHERS[start : start + 10] for start in range(0, len(OTHERS), 10)]
# Types that tensor parallelism splits exactly. Others are split exactly, or refused.
_SPLIT = """
    arcee cohere cohere2 cohere_compass_text cwm ernie4_5 exaone4 gemma gemma2 gemma3_text
    gemma3n_text gemma4_unified_text glm glm4 hrm_text qwen3_5_text youtu
    gpt_neox granite helium hyperclovax jais2 llama ministral ministral3 mistral nanochat nemotron
    olmo olmo2 olmo3 olmo_hybrid phi phi3 qwen2 qwen3 seed_oss smollm3 starcoder2 vaultgemma
"""
SPLIT = _SPLIT.split()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "types", [SOME, *(pytest.param(group, marks=pytest.mark.extended) for group in GROUPS)]
)
def test_two_processes_learn_as_one(types, tmp_path):
    for model_type in types:
        name = model_type.partition("+")[0]
        tiny_model(name).save_pretrained(tmp_path / name)
    script = Path(__file__).with_name("any_model_rank.py")
    for ranks in (1, 2):
        run_ranks(script, ranks, [tmp_path, *types], timeout_s=280)
    one, two = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    for model_type in types:
        alone = one[model_type, 1]
        assert_same(model_type, alone["logprobs"][::2], alone, two[model_type, 1])
        split = two[model_type, 2]
        if isinstance(split, dict):
            assert_same(model_type, alone["logprobs"], alone, split)
        else:
            assert model_type.removesuffix("+reward") not in SPLIT, split
            assert split.startswith("model.tensor_model_parallel_size=2"), split


def test_tensor_parallel_ranks_with_different_gradients_are_refused(tmp_path):
    """Also if the plan was not checked before."""
    tiny_model("apertus").save_pretrained(tmp_path / "apertus")
    script = Path(__file__).with_name("any_model_rank.py")
    run_ranks(script, 2, [tmp_path, "apertus+unchecked"], timeout_s=280)
    refusal = torch.load(tmp_path / "2.pt")["apertus+unchecked", 2]
    assert "ranks compute different gradients of model.layers.0.mlp.act_fn.alpha_" in refusal


def assert_same(model_type, logprobs, alone, together):
    """Compare log-probs, and the changes of all weights with the largest change."""
    torch.testing.assert_close(together["logprobs"], logprobs, atol=1e-4, rtol=0)
    assert together["norm"] == pytest.approx(alone["norm"], rel=1e-3), model_type
    largest = max(change.abs().max() for change in alone["changes"].values())
    assert largest > 0
    for name, change in alone["changes"].items():
        difference = (together["changes"][name] - change).abs().max()
        assert difference <= 1e-3 * largest, (model_type, name)
