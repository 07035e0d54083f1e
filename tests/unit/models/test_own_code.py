"""Models that the Python code in their directory builds: only if the user trusts the code."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from test_any_model import expected_logprobs, load, make_batch, save, update
from tiny_transformers import tiny_config

from aligner.checkpoint.hf.any_model import read_any
from aligner.checkpoint.model_source import open_model
from aligner.config import LoraConfig, OptimConfig, PeftConfig
from aligner.errors import CheckpointError
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.ways import WORDS
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel
from aligner_plan.command import architectures_of

pytestmark = pytest.mark.integration

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
