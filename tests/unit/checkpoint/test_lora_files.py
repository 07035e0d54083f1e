"""What a run with adapters leaves, and what is made of it: merged files, PEFT directories."""

import dataclasses
import json
import runpy
import sys

import pytest
import torch
from batches import ppo_batch
from documented import ROOT
from safetensors.torch import load_file
from test_nemo_kinds import assert_same

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import (
    Adapters,
    MergedWeights,
    adapter_shapes,
    adapters_beside,
    save_adapters,
)
from aligner.checkpoint.convert import convert
from aligner.checkpoint.hf.model_folder import save_hf
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.checkpoint.peft import save_peft
from aligner.config import CriticConfig, LoraConfig, ModelConfig, OptimConfig, PeftConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.errors import CheckpointNotFoundError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

LORA = LoraConfig(adapter_dim=3, alpha=6.0)
GPT2 = dataclasses.replace(
    TINY_ARCHITECTURE,
    family="gpt2",
    num_query_groups=8,
    ffn_hidden_size=256,
    activation="gelu_tanh",
    normalization="layernorm",
    position_embedding="learned_absolute",
    bias_linear=True,
    tie_embeddings=True,
)


def filled(architecture: GPTArchitecture, lora: LoraConfig) -> Adapters:
    generator = torch.Generator().manual_seed(4)
    shapes = adapter_shapes(architecture, lora)
    tensors = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    return Adapters(lora, tensors)


def with_adapters(model, folder):
    """Hugging Face's model with W + alpha / r · B A in the place of W, as PEFT defines it."""
    config = json.loads((folder / "adapter_config.json").read_text())
    state = load_file(folder / "adapter_model.safetensors")
    scale, changed = config["lora_alpha"] / config["r"], 0
    for name, module in model.named_modules():
        prefix = f"base_model.model.{name}"
        targeted = any(name == t or name.endswith(f".{t}") for t in config["target_modules"])
        assert targeted == (f"{prefix}.lora_A.weight" in state), name
        if targeted:
            a, b = state[f"{prefix}.lora_A.weight"], state[f"{prefix}.lora_B.weight"]
            product = scale * b @ a
            module.weight.data += product.T if config["fan_in_fan_out"] else product
            changed += 2
    assert changed == len(state) > 0
    return model


GLM = dataclasses.replace(  # rotates adjacent columns, half of a head, and fuses gate and up
    TINY_ARCHITECTURE, family="glm", bias_qkv=True, rotary_percent=0.5
)
PHI3 = dataclasses.replace(TINY_ARCHITECTURE, family="phi3")  # fuses query, key and value
FAMILIES = {"llama": TINY_ARCHITECTURE, "gpt2": GPT2, "glm": GLM, "phi3": PHI3}


@pytest.mark.parametrize("architecture", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("targets", [("all",), ("attention_qkv", "mlp_fc2")])
def test_transformers_computes_with_exported_adapters_what_the_merged_model_does(
    tmp_path, architecture, targets
):
    from transformers import AutoModelForCausalLM

    lora = dataclasses.replace(LORA, target_modules=targets)
    weights, adapters = random_weights(architecture, scale=0.1), filled(architecture, lora)
    save_hf(tmp_path / "base", weights, architecture, {})
    save_hf(tmp_path / "merged", MergedWeights(weights, adapters), architecture, {})
    save_peft(tmp_path / "peft", adapters, architecture, base_model="somewhere/base")
    base, merged = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        for name in ("base", "merged")
    )
    tokens = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = base(tokens).logits
        expected = merged(tokens).logits
        assert (plain - expected).abs().max() > 0.1
        found = with_adapters(base, tmp_path / "peft")(tokens).logits
    assert (found - expected).abs().max() < 1e-4
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somewhere/base"


def script(monkeypatch, name, **options):
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_scripts_merge_and_export(tmp_path, tiny_nemo, monkeypatch, capsys):
    """The results are the same with the base as a `.nemo` and as a directory."""
    convert(tiny_nemo, tmp_path / "base")
    adapters = filled(TINY_ARCHITECTURE, LORA)
    save_adapters(tmp_path / "run.lora.safetensors", adapters)
    for kind, base in (("nemo", tiny_nemo), ("hf", tmp_path / "base")):
        given = {"model": base, "adapters": tmp_path / "run.lora.safetensors"}
        script(monkeypatch, "merge_lora.py", **given, output=tmp_path / f"{kind}.nemo")
        with open_nemo(tiny_nemo) as base, open_nemo(tmp_path / f"{kind}.nemo") as merged:
            assert_same(merged.weights, MergedWeights(base.weights, adapters))
            assert merged.tokenizer_files == base.tokenizer_files
        script(monkeypatch, "convert_lora_to_peft.py", **given, output=tmp_path / kind)
        files = sorted(path.name for path in (tmp_path / kind).iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert_same(*(load_file(tmp_path / k / "adapter_model.safetensors") for k in ("nemo", "hf")))
    with pytest.raises(SystemExit, match="does not exist"):
        script(monkeypatch, "merge_lora.py", model=tiny_nemo, adapters="none", output="o.nemo")
    capsys.readouterr()


@pytest.mark.parametrize("role", ["policy", "value"])
def test_a_front_goes_on_from_what_it_saved(tmp_path, tiny_nemo, role):
    optim = OptimConfig(lr=1e-2)
    sizes = {"micro_batch_size": 2, "global_batch_size": 4, "optim": optim}
    peft = PeftConfig("lora", lora_tuning=LORA)
    model = ModelConfig(restore_from_path=str(tiny_nemo), peft=peft, **sizes)
    with open_nemo(tiny_nemo) as checkpoint:
        tokenizer = checkpoint.tokenizer
    cluster = LocalCluster(initialize_parallel())
    batch = BatchedDataDict(ppo_batch([12] * 4, [0] * 4))

    def start(**paths):
        if role == "policy":
            return Policy(cluster, model, tokenizer, **paths)
        return Value(cluster, CriticConfig(**sizes), tokenizer, model=model, **paths)

    def answers(handle):
        if role == "policy":
            return handle.get_logprobs(batch)["logprobs"]
        return handle.get_values(batch)["values"]

    def learn(handle):
        handle.prepare_for_training()
        handle.train(batch, PPOPolicyLoss() if role == "policy" else PPOValueLoss())
        handle.prepare_for_inference()

    first = start()
    learn(first)
    paths = {"weights_path": str(tmp_path / "r.nemo"), "optimizer_path": str(tmp_path / "optim")}
    first.save_checkpoint(**paths)
    assert adapters_beside(paths["weights_path"]).is_file()
    second = start(**paths)
    assert torch.equal(answers(second), answers(first))
    for handle in (first, second):
        learn(handle)
    assert torch.equal(answers(second), answers(first))
    if role == "policy":  # still that of the frozen weights
        one, *others = (
            handle.get_reference_policy_logprobs(batch)["reference_logprobs"]
            for handle in (first, second, start())
        )
        assert all(torch.equal(one, other) for other in others)
    adapters_beside(paths["weights_path"]).unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"r\.lora\.safetensors"):
        start(**paths)
