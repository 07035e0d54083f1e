"""Models in bfloat16, on the CPU: every weight has the dtype, and passes run.

1. Families differ in the modules that they have: learned positions, LayerNorm, biases, experts.
2. Log-probs are those of float32 up to rounding; an update runs.
"""

import dataclasses

import pytest
import torch
from batches import ppo_batch

from aligner.config import LengthParams, OptimConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel
from aligner.models.gpt.role.settings import RoleSettings

pytestmark = pytest.mark.integration

LEARNED = {
    "position_embedding": "learned_absolute",
    "normalization": "layernorm",
    "activation": "gelu",
    "bias_linear": True,
    "bias_qkv": True,
    "tie_embeddings": True,
    "num_query_groups": 8,
}
FAMILIES = {
    "llama": {},
    "gpt2": LEARNED,
    "no biases": {**LEARNED, "bias_linear": False, "bias_qkv": False, "tie_embeddings": False},
    "mixture": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "family": "mixtral"},
}
ROWS, LENGTH = 4, 24


def actor(family, precision):
    torch.manual_seed(1)
    architecture = dataclasses.replace(TINY_ARCHITECTURE, **FAMILIES[family])
    return MegatronGPTActorModel(
        {"vocab_size": architecture.vocab_size},
        settings=RoleSettings(
            precision=precision,
            optim=OptimConfig(lr=1e-5),
            micro_batch_size=ROWS,
            global_batch_size=ROWS,
            length_params=LengthParams(max_length=6),
        ),
        architecture=architecture,
        tokenizer=byte_level_tokenizer(),
    )


def batch():
    lengths = [LENGTH] * ROWS
    return {**ppo_batch(lengths, [0] * ROWS, seed=2), "ref_logprobs": torch.ones(ROWS, LENGTH)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_bfloat16_and_passes_run(family):
    exact, narrow = (actor(family, precision) for precision in ("32", "bf16"))
    dtypes = {name: each.dtype for name, each in narrow.gpt.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == set()
    with torch.no_grad():
        weights = dict(exact.gpt.named_parameters())
        for name, parameter in narrow.gpt.named_parameters():
            parameter.copy_(weights[name])
    data = batch()
    logprobs = [role.get_logprobs(data) for role in (exact, narrow)]
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.02
    prompts, lengths = data["input_ids"][:, :8].contiguous(), torch.full((ROWS,), 8)
    narrow.generator.sample(prompts, lengths, torch.arange(ROWS), seed=1)
    narrow.setup_training()
    narrow.loss_fn = PPOPolicyLoss()
    narrow.prepare_for_training()
    assert narrow.training_update(data)["skipped"] == 0.0
