"""Adapters of models that only transformers builds, and models of a directory's own code."""

import importlib.util
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from role_models import (
    assert_equal,
    check_recomputed,
    check_reference,
    check_resumed,
    write_tokenizer,
)
from safetensors.torch import load_file
from test_any_model import expected_logprobs, load, make_batch, save, update
from tiny_transformers import tiny_config
from transformers import AutoModelForCausalLM
from variants import extended_except

from aligner.algorithms.run.startup import describe_model
from aligner.checkpoint.adapters import adapter_shapes, read_adapters
from aligner.checkpoint.convert import lora_to_peft
from aligner.checkpoint.hf.any_model import read_any
from aligner.checkpoint.model_source import open_model
from aligner.config import LoraConfig, ModelConfig, OptimConfig, PeftConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.dtensor.ways import WORDS
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from aligner.parallel.groups import initialize_parallel
from aligner_plan.command import architectures_of

pytestmark = pytest.mark.integration

# Experts of both layouts and of a class of their own, a state space, Conv1D, indexers, shared
# layers, a linear class of its own, and softly capped logits.
_TYPES = """
    mixtral mamba2 gemma2 gpt_oss openai-gpt granitemoe jamba deepseek_v32 zamba2 falcon llama4_text
    longcat_flash phi3 bloom qwen3_next olmo2 gptj stablelm nemotron_h rwkv recurrent_gemma opt
    deepseek_v3 dbrx lfm2 aria_text deepseek_v4 zamba
"""
TYPES = _TYPES.split()


def adapted(folder, **changes):
    tuning = LoraConfig(adapter_dim=4, alpha=8.0, **changes.pop("tuning", {}))
    return load(folder, lora=tuning, **{"optim": OptimConfig(name="sgd", lr=0.3), **changes})


def matrices(role):
    return {s.name: s.local.clone() for s in role.trained_shards}


def refused(folder, targets):
    try:
        update(adapted(folder, tuning={"target_modules": targets}), PPOPolicyLoss())
    except ConfigError as error:
        return str(error)
    return ""


def logprobs_of_files(role, folder):
    """Log-probs of transformers' model with the role's weights, in which adapters are merged."""
    return expected_logprobs(AutoModelForCausalLM.from_pretrained(save(role, folder)))


@pytest.mark.parametrize("model_type", extended_except(TYPES[:2], TYPES))
def test_every_adapter_learns_beside_frozen_weights(model_type, folder_of, tmp_path):
    folder = folder_of(model_type)
    targets: tuple[str, ...] = ("all",)
    refusal = refused(folder, targets)
    if refusal:  # adapters that cannot learn
        idle, text = re.search(r"adapters of (\S+?),? .*target_modules=\[(.*)\]", refusal).groups()
        targets = tuple(text.split(","))
        assert not any(f".{target}." in f".{idle}." for target in targets)
        assert not refused(folder, targets)
    source = read_any(folder)
    role = adapted(folder, tuning={"target_modules": targets})
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
    assert (logprobs_of_files(role, tmp_path / "merged") - after).abs().max() < 1e-4


def test_a_run_state_and_a_file_of_adapters_continue_bit_for_bit(folder_of, tmp_path):
    folder, path = folder_of("mixtral"), tmp_path / "a.lora.safetensors"
    role, resumed = adapted(folder, optim=OptimConfig()), adapted(folder, optim=OptimConfig())
    role.keep_reference()
    original = role.get_reference_logprobs(make_batch())
    state = check_resumed(role, resumed, make_batch())
    assert state["slices"].keys() == matrices(role).keys()
    # A reference that starts from adapters has these adapters.
    role.save_adapters(path)
    loaded = adapted(folder, adapters_path=str(path))
    assert_equal(matrices(loaded), matrices(role))
    assert not torch.equal(check_reference(loaded, make_batch()), original)
    with pytest.raises(CheckpointError, match=r"does not contain .* model\.peft was changed"):
        load(folder).load_run_state([state])


def test_a_critic_learns_adapters_and_its_head_together(folder_of, tmp_path):
    folder = folder_of("olmo2")
    critic = adapted(folder, kind=DTensorCriticModel)
    update(critic, PPOValueLoss(0.2))
    assert {"score.weight", "score.bias"} < matrices(critic).keys()
    critic.save_adapters(tmp_path / "c.lora.safetensors")
    saved = read_adapters(tmp_path / "c.lora.safetensors", critic.architecture)
    assert saved.tensors["rm_head.weight"].abs().max() > 0
    again = adapted(folder, kind=DTensorCriticModel)
    again.load_adapters(tmp_path / "c.lora.safetensors")
    assert torch.equal(again.get_values(make_batch()), critic.get_values(make_batch()))
    with pytest.raises(CheckpointError, match="has no head"):
        adapted(folder).load_adapters(tmp_path / "c.lora.safetensors")


def test_recomputed_activations_give_the_same_adapters(folder_of):
    learner = partial(adapted, folder_of("mixtral"))
    check_recomputed(learner, PPOPolicyLoss(), make_batch(), "full", rtol=1e-4)


def test_targets_are_parts_of_names(folder_of):
    architecture = read_any(folder_of("gpt_oss")).architecture
    shapes = adapter_shapes(architecture, LoraConfig(("self_attn", "experts.down_proj"), 4))
    assert {name.split("layers.0.")[1] for name in shapes if "layers.0." in name} == {
        *(f"self_attn.{x}_proj.lora.{leaf}" for x in "qkvo" for leaf in "ab"),
        *(f"mlp.experts.down_proj_lora.{leaf}" for leaf in "ab"),
    }
    first = "model.layers.0.mlp.experts.down_proj_lora"
    assert (shapes[f"{first}.a"], shapes[f"{first}.b"]) == ((4, 4, 96), (4, 64, 4))
    text = r"target_modules=\[mlp_fc1\]: no linear .* named 'mlp_fc1'\. Use .* all, down_pr"
    with pytest.raises(ConfigError, match=text):
        adapter_shapes(architecture, LoraConfig(("mlp_fc1",)))
    with pytest.raises(ConfigError, match=r"adapter_dim=999 exceeds both .*q_proj \(64 x 64\)"):
        adapter_shapes(architecture, LoraConfig(("q_proj",), 999))


def test_adapters_without_a_gradient_are_refused_by_name(folder_of):
    with pytest.raises(ConfigError, match=r"layers\.0\.mixer\.dt_proj, .* get no gradient.*x_proj"):
        update(adapted(folder_of("mamba")), PPOPolicyLoss())


@pytest.mark.parametrize(
    "model_type", extended_except(["llama"], ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
)
def test_directories_of_families_with_a_table_get_adapters(
    model_type, folder_of, tmp_path, tiny_nemo
):
    folder = folder_of(model_type, vocab_size=259)  # the tokenizer's
    tokenizer = write_tokenizer(folder)
    lora = LoraConfig(("all",), 4)
    peft = PeftConfig(peft_scheme="lora", lora_tuning=lora)
    config = ModelConfig(restore_from_path=str(folder), peft=peft)
    assert not describe_model(config, "dtensor")[1].has_table
    # Without adapters, the table is used.
    assert describe_model(replace(config, peft=PeftConfig()), "dtensor")[1].has_table
    settings = RoleSettings(lora=lora, optim=OptimConfig(name="sgd", lr=0.3), micro_batch_size=4)
    role = DTensorPolicyWorkerV2.load_model(settings, str(folder), tokenizer)
    initial = matrices(role)
    update(role, PPOPolicyLoss())
    assert not any(m.equal(initial[n]) for n, m in matrices(role).items() if n.endswith("b"))
    merged = logprobs_of_files(role, tmp_path / "merged")
    assert (merged - role.get_logprobs(make_batch())).abs().max() < 1e-4
    role.save_adapters(tmp_path / "a.lora.safetensors")
    assert "rank 4" in lora_to_peft(folder, tmp_path / "a.lora.safetensors", tmp_path / "peft")
    # A .nemo gets no adapters.
    with pytest.raises(ConfigError, match=r"adapters .*\.nemo.*Hugging Face directory"):
        DTensorPolicyWorkerV2.load_model(settings, str(tiny_nemo), tokenizer)


@pytest.mark.parametrize(
    "model_type", extended_except(["mixtral"], ["mixtral", "gpt_oss", "openai-gpt", "phi3"])
)
def test_the_export_is_in_the_form_of_peft(model_type, folder_of, tmp_path):
    """The test adds products in PEFT's layout, or PEFT itself where it is installed."""
    folder, target = folder_of(model_type), tmp_path / "peft"
    role = adapted(folder)
    for loss in (PPOPolicyLoss(), NegativeLogLikelihoodLoss()):
        update(role, loss)
    role.save_adapters(tmp_path / "a.lora.safetensors")
    assert "rank 4" in lora_to_peft(folder, tmp_path / "a.lora.safetensors", target, str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((target / "adapter_config.json").read_text())
    if importlib.util.find_spec("peft"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, target)
    else:
        add_products(model, config, load_file(target / "adapter_model.safetensors"))
    difference = expected_logprobs(model) - role.get_logprobs(make_batch())
    assert difference.abs().max() < 1e-4


@torch.no_grad()
def add_products(model, config, state):
    scale = config["lora_alpha"] / config["r"]
    for name in config["target_modules"]:
        a, b = (state.pop(f"base_model.model.{name}.lora_{leaf}.weight") for leaf in "AB")
        delta = scale * b @ a
        model.get_submodule(name).weight += delta.T if config["fan_in_fan_out"] else delta
    # In a module of experts the first parameter is the innermost.
    modules = {}
    for name in config["target_parameters"] or ():
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    for module, names in modules.items():
        for depth, name in enumerate(reversed(names)):
            prefix = f"base_model.model.{module}{'.base_layer' * depth}"
            a, b = (state.pop(f"{prefix}.lora_{leaf}.weight") for leaf in "AB")
            weight = model.get_parameter(name)
            experts = len(weight)
            a, b = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts)
            is_transposed = model.get_submodule(module).is_transposed
            form = "e i o" if is_transposed else "e o i"
            weight += scale * torch.einsum(f"o r e, e r i -> {form}", b, a)
    assert not state


CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

open({marker!r}, "w").close()

class OwnConfig(LlamaConfig):
    model_type = "own"

class Mean(nn.Module):
    def forward(self, hidden_states, **_):
        count = torch.arange(1, 1 + hidden_states.shape[1]).to(hidden_states)
        return hidden_states.cumsum(1) / count[:, None], None

class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 40)
        self.down = nn.Linear(40, config.hidden_size)

    def forward(self, hidden):
        return self.down(self.up(hidden).sin())

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OwnMLP(config)
            if {is_mean}:
                layer.self_attn = Mean()
"""
AUTO_MAP = {
    "AutoConfig": "modeling_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Write a model of type ``name``, and return its directory and the mark of an import."""
    modules = transformers.dynamic_module_utils
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def write(name="own", is_mean=False):
        folder, mark = tmp_path / f"{name}_{is_mean}", tmp_path / "imported"
        tiny_config("llama").save_pretrained(folder)
        settings = json.loads((folder / "config.json").read_text())
        settings |= {"model_type": name, "auto_map": AUTO_MAP}
        (folder / "config.json").write_text(json.dumps(settings))
        code = CODE.replace("{marker!r}", repr(str(mark))).replace("{is_mean}", str(is_mean))
        (folder / "modeling_own.py").write_text(code)
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        auto = transformers.AutoModelForCausalLM
        auto.from_config(config, trust_remote_code=True).save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved | {"model_type": name}))
        mark.unlink()
        return folder, mark

    return write


def trusted(folder, **changes):
    settings = RoleSettings(sequence_packing="auto", micro_batch_size=4, **changes)
    source = read_any(folder, trusted=True)
    return DTensorActorModel(source, settings, initialize_parallel(), None)


def test_code_is_not_imported_unless_it_is_trusted(own_folder):
    folder, mark = own_folder()
    with pytest.raises(CheckpointError, match=r"'own'.*auto_map.*model\.trust_remote_code=true"):
        load(folder)
    with pytest.raises(CheckpointError, match="trust_remote_code"), open_model(folder, "dtensor"):
        pass
    assert not mark.exists()


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_code_precedes_a_table_of_tensors_only_if_it_is_trusted(backend, own_folder):
    folder, mark = own_folder("llama")
    with pytest.raises(CheckpointError, match="do not fit"), open_model(folder, backend):
        pass
    assert not mark.exists()
    with open_model(folder, backend, trusted=True) as source:
        assert source.architecture.code == str(folder)
    peft = PeftConfig()
    model = SimpleNamespace(restore_from_path=str(folder), trust_remote_code=True, peft=peft)
    config = SimpleNamespace(model=model, policy=SimpleNamespace(backend=backend))
    refused = pytest.raises(CheckpointError, match=r"Set policy\.backend=dtensor")
    with refused if backend == "megatron" else nullcontext():
        planned = architectures_of(config, SimpleNamespace(architecture=None))
        assert planned[str(folder)].code == str(folder)


@pytest.mark.parametrize(("is_mean", "way"), [(False, "aligner"), (True, "rows")])
@pytest.mark.parametrize("lora", [None, LoraConfig(adapter_dim=4)])
def test_a_model_of_own_code_passes_the_tests_of_the_ways(is_mean, way, lora, own_folder, tmp_path):
    folder, _ = own_folder(is_mean=is_mean)
    role = trusted(folder, optim=OptimConfig(lr=1e-3), lora=lora)
    assert (role.form.way, role.settings.sequence_packing) == (way, way == "aligner")
    assert f"own of the code in {folder}: {WORDS[way]}" in role.way_in_words()
    auto = transformers.AutoModelForCausalLM
    expected = expected_logprobs(auto.from_pretrained(folder, trust_remote_code=True))
    assert (role.get_logprobs(make_batch()) - expected).abs().max() < 1e-4
    update(role, PPOPolicyLoss())
    after = role.get_logprobs(make_batch())
    assert (after - expected).abs().max() > 1e-3
    # The saved directory contains the code.
    saved = save(role, tmp_path / "saved")
    (folder / "modeling_own.py").unlink()
    assert (trusted(saved).get_logprobs(make_batch()) - after).abs().max() < 1e-5
