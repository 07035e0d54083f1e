"""Adapters of models that only transformers builds: every adapter learns, or is refused by name."""

import copy
import re

import pytest
import torch
from test_any_model import expected_logprobs, load, make_batch, update
from tiny_transformers import tiny_model
from transformers import AutoModelForCausalLM

from aligner.checkpoint.adapters import adapter_shapes, read_adapters
from aligner.checkpoint.hf.any_model import read_any, save_any
from aligner.config import LoraConfig, OptimConfig
from aligner.errors import ConfigError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.dtensor.critic import DTensorCriticModel

pytestmark = pytest.mark.integration

# Experts of both layouts and of a class of their own, a state space, Conv1D, indexers, shared
# layers, a linear class of its own, and softly capped logits.
TYPES = """
    mixtral mamba2 gemma2 gpt_oss openai-gpt granitemoe jamba deepseek_v32 zamba2 falcon llama4_text
    longcat_flash phi3 bloom qwen3_next olmo2 gptj stablelm nemotron_h rwkv recurrent_gemma opt
    deepseek_v3 dbrx lfm2 aria_text
""".split()
DEFAULT = TYPES[:2]


def adapted(folder, **changes):
    tuning = LoraConfig(adapter_dim=4, alpha=8.0, **changes.pop("tuning", {}))
    return load(folder, lora=tuning, **{"optim": OptimConfig(name="sgd", lr=0.3), **changes})


def matrices(role):
    return {s.name: s.local.clone() for s in role.trained_shards}


@pytest.fixture
def folder_of(tmp_path):
    def write(model_type, **more):
        folder = tmp_path / model_type
        tiny_model(model_type, **more).save_pretrained(folder)
        return folder

    return write


@pytest.mark.parametrize(
    "model_type",
    [*DEFAULT, *(pytest.param(kind, marks=pytest.mark.extended) for kind in TYPES[len(DEFAULT) :])],
)
def test_every_adapter_learns_beside_frozen_weights(model_type, folder_of, tmp_path):
    folder = folder_of(model_type)
    role = adapted(folder)
    try:
        update(role, PPOPolicyLoss())
    except ConfigError as error:  # adapters that cannot learn
        found = re.search(r"adapters of (\S+?),? .*Set target_modules=\[(.*)\]", str(error))
        assert found, error
        print(model_type, error)
        targets = tuple(found[2].split(","))
        assert not any(f".{found[1]}".endswith(f".{target}") for target in targets)
        role = adapted(folder, tuning={"target_modules": targets})
        update(role, PPOPolicyLoss())
    source = read_any(folder)
    role = adapted(folder, tuning={"target_modules": role.settings.lora.target_modules})
    original = expected_logprobs(AutoModelForCausalLM.from_pretrained(folder))
    initial, before = matrices(role), role.get_logprobs(make_batch())
    assert (before - original).abs().max() < 1e-4
    assert initial.keys() == adapter_shapes(source.architecture, role.settings.lora).keys()
    role.keep_reference()
    # A step of GRPO moves each B, and a step of SFT then moves each A.
    for leaf, loss in (("b", PPOPolicyLoss()), ("a", NegativeLogLikelihoodLoss())):
        update(role, loss)
        same = [n for n, m in matrices(role).items() if n.endswith(leaf) and m.equal(initial[n])]
        assert not same
    after = role.get_logprobs(make_batch())
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(role.get_reference_logprobs(make_batch()), before)
    # Merged weights are the model, which differs in the adapted weights only.
    weights = role.whole_weights()
    changed = {n for n, w in weights.items() if not torch.equal(w, source.weights[n])}
    assert changed == {weight.parameter for weight in role.model.adapted}
    save_any(tmp_path / "merged", weights, role.architecture, {}, {})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (expected_logprobs(merged) - after).abs().max() < 1e-4
