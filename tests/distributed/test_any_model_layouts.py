"""Models of transformers on two processes, data or tensor parallel, learn as on one."""

import os

import pytest
import torch
import transformers
from batches import ppo_batch
from ranks import on_ranks
from tiny_transformers import model_types, tiny_model

from aligner.checkpoint.hf.any_model import empty_model, read_any
from aligner.config import LoraConfig, OptimConfig, ParallelConfig
from aligner.errors import LayoutError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.dtensor import model
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.critic import DTensorRewardModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel

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


def make_batch(rank, ranks):
    batch = ppo_batch([11, 7, 13, 9], [1] * 4, seed=0)
    batch["input_ids"] = 3 + batch["input_ids"] % 117
    return {name: column[rank::ranks] for name, column in batch.items()}


def updated(folder, layout, variant):
    parallel = initialize_parallel(layout)
    source = read_any(folder)
    recomputes = empty_model(source.architecture).supports_gradient_checkpointing
    settings = RoleSettings(
        parallel=layout,
        optim=OptimConfig(name="sgd", lr=1e-3),
        gradient_clip_val=0.0,
        micro_batch_size=1,
        sequence_packing="auto",
        recompute="full" if recomputes else None,
        lora=LoraConfig(adapter_dim=3) if variant == "lora" else None,  # no divisor of the rows
    )
    is_reward = variant == "reward"
    kind = DTensorRewardModel if is_reward else DTensorActorModel
    role = kind.from_checkpoint(source, settings=settings, tokenizer=None)
    for shard in role.shards:
        if shard.name == "score.weight":  # a fresh head is zero and lets no gradient into the body
            shard.local.normal_(generator=torch.Generator().manual_seed(3))
    batch = make_batch(parallel.dp_rank, parallel.dp_size)
    before = role.whole_weights()
    logprobs = role.infer(batch) if is_reward else role.get_logprobs(batch)
    role.setup_training()
    role.loss_fn = PPOValueLoss(value_clip=None) if is_reward else PPOPolicyLoss()
    role.prepare_for_training()
    norm = role.training_update(batch)["grad_norm"]
    after = role.whole_weights()
    changes = {name: after[name] - weight for name, weight in before.items()}
    return {"logprobs": logprobs, "norm": norm, "changes": changes}


def learned(folder, types):
    """Log-probs of rank 0's rows and changes of weights, or why a layout is refused.

    By type and tensor-parallel size: all ranks are data parallel, then all are tensor parallel.
    """
    transformers.logging.set_verbosity_error()
    seen = {}
    for model_type in types:
        name, _, variant = model_type.partition("+")
        if variant == "unchecked":
            model.check_backend = lambda *_: None
        for tensor in {1, int(os.environ["WORLD_SIZE"])}:
            layout = ParallelConfig(tensor=tensor)
            try:
                seen[model_type, tensor] = updated(folder / name, layout, variant)
            except LayoutError as refusal:
                seen[model_type, tensor] = str(refusal)
    return seen


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "types", [SOME, *(pytest.param(group, marks=pytest.mark.extended) for group in GROUPS)]
)
def test_two_processes_learn_as_one(types, tmp_path):
    for model_type in types:
        name = model_type.partition("+")[0]
        tiny_model(name).save_pretrained(tmp_path / name)
    one, two = (on_ranks(ranks, learned, tmp_path, types) for ranks in (1, 2))
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
    refusal = on_ranks(2, learned, tmp_path, ["apertus+unchecked"])["apertus+unchecked", 2]
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
