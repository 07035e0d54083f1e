"""Models of transformers on two processes, sharded by FSDP2, learn as on one."""

import re
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tiny_transformers import model_types, tiny_model

pytestmark = pytest.mark.integration

# zamba shares layers. With adapters, weights are trained beside frozen ones.
SOME = ["gemma3_text", "deepseek_v3", "mamba2", "zamba", "mixtral+lora"]
OTHERS = [kind for kind in model_types() if kind not in (*SOME, "modernbert-decoder")]
GROUPS = [OTHERS[start : start + 25] for start in range(0, len(OTHERS), 25)]


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
        run_ranks(script, ranks, [tmp_path, 1, *types], timeout_s=280)
    one, two = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    for model_type in types:
        expected = one[model_type]["logprobs"][::2]
        torch.testing.assert_close(two[model_type]["logprobs"], expected, atol=1e-4, rtol=0)
        assert_learned_alike(model_type, one[model_type], two[model_type])


# Tied weights, norms of heads, norms over all heads, gathered projections.
SPLIT = ["gemma3_text", "olmo2"]
REFUSED = {
    "apertus": "ranks compute different gradients of .*act_fn.alpha_n",
    "mixtral": "the plan .* for mixtral models uses moe_tp_experts, packed_colwise",
    "mamba2": "no tensor-parallel plan for mamba2 models",
}
LEFT = [kind for kind in OTHERS if kind not in (*SPLIT, *REFUSED)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "types",
    [
        [*SPLIT, *REFUSED],
        *(
            pytest.param(LEFT[start : start + 25], marks=pytest.mark.extended)
            for start in range(0, len(LEFT), 25)
        ),
    ],
)
def test_two_tensor_parallel_processes_learn_as_one_or_refuse(types, tmp_path):
    for model_type in types:
        tiny_model(model_type).save_pretrained(tmp_path / model_type)
    script = Path(__file__).with_name("any_model_rank.py")
    for ranks in (1, 2):
        run_ranks(script, ranks, [tmp_path, ranks, *types], timeout_s=280)
    one, two = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    for model_type in types:
        together = two[model_type]
        if isinstance(together, str):
            assert model_type not in SPLIT, together
            assert "model.tensor_model_parallel_size=2" in together
            assert re.search(REFUSED.get(model_type, model_type), together), together
            continue
        assert model_type not in REFUSED
        expected = one[model_type]["logprobs"]
        torch.testing.assert_close(together["logprobs"], expected, atol=1e-4, rtol=0)
        assert_learned_alike(model_type, one[model_type], together)


def assert_learned_alike(model_type, alone, together):
    """Compare the changes of all weights with the largest change."""
    assert together["norm"] == pytest.approx(alone["norm"], rel=1e-3), model_type
    largest = max(change.abs().max() for change in alone["changes"].values())
    assert largest > 0
    for name, change in alone["changes"].items():
        difference = (together["changes"][name] - change).abs().max()
        assert difference <= 1e-3 * largest, (model_type, name)
