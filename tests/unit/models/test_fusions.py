"""Fused operations for GPUs, computed on the CPU, against what they stand for.

1. A model with them says what it says without them, gradients included.
2. Grouped products of experts are the products one by one, for experts without tokens too.
3. In bf16 the fused rotation is nearer to the exact one than megatron-core's.
4. Nothing is fused on a CPU, and layers that are not there are refused by their key.
"""

import dataclasses

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer import attention as megatron_attention

from aligner.config import LayerOptions
from aligner.errors import ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.logprobs.output_layer import bypassed_output_layer
from aligner.models.gpt.layers import layer_spec
from aligner.models.gpt.layers.fusions import Fusions, _apply_rotary, rotate
from aligner.models.gpt.megatron import build
from aligner.models.gpt.megatron.build import build_gpt, transformer_config
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel

LENGTH = 136  # beyond what CPU attention does by itself
EXPERTS = dataclasses.replace(
    TINY_ARCHITECTURE, num_moe_experts=16, moe_ffn_hidden_size=24, family="mixtral"
)
BIASED = dataclasses.replace(TINY_ARCHITECTURE, bias_linear=True, bias_qkv=True)


@pytest.fixture(autouse=True)
def eager():
    """Compiled functions are called as they were written."""
    initialize_parallel(RoleSettings().parallel, seed=1)
    with torch.compiler.set_stance("force_eager"):
        yield


def answers(architecture):
    """Hidden states of two sequences, and the gradient of every parameter."""
    torch.manual_seed(3)
    gpt = build_gpt(architecture).train()
    for name, parameter in gpt.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 256, (2, LENGTH))
    positions = torch.arange(LENGTH).expand(2, -1)
    with bypassed_output_layer(gpt):
        hidden = gpt(tokens, positions, None)
    hidden.square().mean().backward()
    grads = {name: each.grad for name, each in gpt.named_parameters() if each.grad is not None}
    return {"hidden": hidden.detach(), **grads}, gpt


@pytest.mark.integration
@pytest.mark.parametrize(
    ("architecture", "biases"),
    [(TINY_ARCHITECTURE, False), (BIASED, True), (EXPERTS, False)],
    ids=["plain", "biased", "experts"],
)
def test_a_fused_model_is_the_same_model(architecture, biases, monkeypatch):
    plain, _ = answers(architecture)
    monkeypatch.setattr(megatron_attention, "apply_rotary_pos_emb", _apply_rotary)
    fused = Fusions(swiglu=True, rotary=True, bias=biases)
    monkeypatch.setattr(build.Fusions, "of", lambda *_: fused)
    monkeypatch.setattr(layer_spec, "can_group", lambda _: True)
    calls = []
    monkeypatch.setattr(
        "aligner.models.gpt.layers.fusions.rotate", lambda *args: calls.append(1) or rotate(*args)
    )
    same, gpt = answers(architecture)
    assert len(calls) == 4 * architecture.num_layers  # query and key, there and back
    assert gpt.config.bias_activation_fusion
    assert plain.keys() == same.keys()
    for name, value in plain.items():
        largest = max(1e-6, value.abs().max().item())
        assert (same[name] - value).abs().max().item() <= 2e-5 * largest, name


@pytest.mark.integration
def test_an_expert_without_tokens_learns_nothing(monkeypatch):
    monkeypatch.setattr(layer_spec, "can_group", lambda _: True)
    layer = build_gpt(EXPERTS).decoder.layers[0].mlp.experts
    assert type(layer).__name__ == "GroupedExperts"
    counts = torch.tensor([0, 3] * 8)
    rows = torch.randn(24, EXPERTS.hidden_size, requires_grad=True)
    shares = torch.rand(24, requires_grad=True)
    outs, grads = [], []
    for forward in (layer.forward, super(type(layer), layer).forward):
        out, bias = forward(rows, counts, shares)
        assert bias is None
        wanted = [rows, shares, *layer.parameters()]
        grads.append(torch.autograd.grad(out.square().sum(), wanted, allow_unused=True))
        outs.append(out)
    torch.testing.assert_close(*outs)
    for ours, one_by_one in zip(*grads, strict=True):
        torch.testing.assert_close(ours, one_by_one)
    assert not grads[0][2].any()
    assert grads[0][4].any()


def test_the_fused_rotation_rounds_once():
    half = torch.rand(LENGTH, 1, 1, 8) * LENGTH
    angles = torch.cat((half, half), dim=-1)
    heads = torch.randn(LENGTH, 2, 3, 20)
    exact = _apply_rotary_pos_emb_bshd(heads.double(), angles.double())
    torch.testing.assert_close(rotate(heads, angles, 1.0).double(), exact, atol=1e-5, rtol=1e-5)
    low = heads.bfloat16()
    exact = _apply_rotary_pos_emb_bshd(low.double(), angles.double())
    error = {
        name: (rotated.double() - exact).abs().mean()
        for name, rotated in {
            "fused": rotate(low, angles, 1.0),
            "chain": _apply_rotary_pos_emb_bshd(low, angles),
        }.items()
    }
    assert error["fused"] < 0.7 * error["chain"]


@pytest.mark.extended
def test_the_rotation_can_be_compiled():
    half = torch.rand(LENGTH, 1, 1, 8)
    angles = torch.cat((half, half), dim=-1)
    with torch.compiler.set_stance("default"):
        for rows in (1, 2, 3):
            heads = torch.randn(LENGTH, rows, 3, 20)
            expected = _apply_rotary_pos_emb_bshd(heads, angles)
            torch.testing.assert_close(rotate(heads, angles, 1.0), expected)


def test_nothing_is_fused_on_a_cpu():
    config = transformer_config(TINY_ARCHITECTURE)
    assert not config.rotates_in_one_kernel
    assert not config.bias_activation_fusion
    assert not config.gradient_accumulation_fusion
    assert config.use_te_activation_func


def test_layers_that_are_not_there_are_refused():
    layers = LayerOptions(spec="transformer_engine")
    with pytest.raises(ConfigError, match=r"model\.layer_spec=transformer_engine needs .* no GPU"):
        transformer_config(TINY_ARCHITECTURE, RoleSettings(layers=layers))
    with pytest.raises(ConfigError, match=r"model\.fp8=hybrid .* model\.layer_spec=local"):
        build.check_fp8(
            RoleSettings(fp8="hybrid", precision="bf16", layers=LayerOptions(spec="local"))
        )
