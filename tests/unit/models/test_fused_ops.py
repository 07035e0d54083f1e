"""Operations that are one piece on a CPU, or one kernel on a GPU, against the plain formulas."""

import dataclasses
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer import attention as megatron_attention

from aligner.config import LayerOptions
from aligner.device import host_memory
from aligner.errors import ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.kernels.linear_product import ColumnLinear, RowLinear
from aligner.logprobs.output_layer import bypassed_output_layer
from aligner.models.gpt.forward.schedule import placed_positions
from aligner.models.gpt.forward.token_layout import LayoutRules, build_layout
from aligner.models.gpt.layers import elementwise, layer_spec, short_attention
from aligner.models.gpt.layers.attention import SegmentParams
from aligner.models.gpt.layers.dot_product import attend_rows
from aligner.models.gpt.layers.elementwise import SwiGLU, rms_norm, swiglu
from aligner.models.gpt.layers.fusions import Fusions, _apply_rotary, rotate
from aligner.models.gpt.megatron import build
from aligner.models.gpt.megatron.build import build_gpt, transformer_config
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

LONG = 136  # beyond what CPU attention does by itself
EXPERTS = dataclasses.replace(
    TINY_ARCHITECTURE, num_moe_experts=16, moe_ffn_hidden_size=24, family="mixtral"
)
BIASED = dataclasses.replace(TINY_ARCHITECTURE, bias_linear=True, bias_qkv=True)
SMALL = dataclasses.replace(
    TINY_ARCHITECTURE, num_layers=2, num_attention_heads=4, num_query_groups=2
)
LENGTH, BATCH, GROUPS, WIDTH, ROTATED = 5, 2, 2, 6, 4
SCALE = 0.4


@pytest.fixture(autouse=True)
def eager():
    """Compiled functions are called as they were written."""
    initialize_parallel(RoleSettings().parallel, seed=1)
    with torch.compiler.set_stance("force_eager"):
        yield


def angles():
    halves = torch.rand(LENGTH, 1, 1, ROTATED // 2, dtype=torch.float64) * 3
    return torch.cat((halves, halves), dim=-1)


def plain_attention(mixed, table):
    queries = mixed.shape[3] - 2
    query, key, value = mixed.split([queries, 1, 1], dim=3)
    query, key = (_apply_rotary_pos_emb_bshd(part.flatten(2, 3), table) for part in (query, key))
    out = F.scaled_dot_product_attention(
        *(part.permute(1, 2, 0, 3) for part in (query, key, value.flatten(2, 3))),
        is_causal=True,
        scale=SCALE,
        enable_gqa=True,
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def plain_swiglu(rows):
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rms_norm(hidden, weight, eps):
    return F.rms_norm(hidden, weight.shape, weight, eps)


def check(ours, plain, *inputs):
    inputs = [value.double().requires_grad_() for value in inputs]
    out = plain(*inputs)
    torch.testing.assert_close(ours(*inputs), out)
    grad = torch.randn_like(out)
    slopes = (torch.autograd.grad(each(*inputs), inputs, grad) for each in (ours, plain))
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("queries", [1, 3])
def test_short_attention_is_rotary_causal_attention(queries):
    torch.manual_seed(3)
    table = angles()
    mixed = torch.randn(LENGTH, BATCH, GROUPS, queries + 2, WIDTH)
    check(
        lambda heads: short_attention.short_attention(heads, table, SCALE),
        lambda heads: plain_attention(heads, table),
        mixed,
    )


def test_swiglu_and_rms_norm_are_their_formulas():
    torch.manual_seed(5)
    hidden, weight = torch.randn(3, 2, 8), torch.rand(8) + 0.5
    check(swiglu, plain_swiglu, hidden)
    check(partial(rms_norm, eps=1e-3), partial(plain_rms_norm, eps=1e-3), hidden, weight)


def new_model(architecture=SMALL):
    torch.manual_seed(0)
    return build_gpt(architecture).train()


def hidden_states(model, length=9, packed=False):
    """Of three sequences of ``length`` tokens."""
    torch.manual_seed(1)
    ids = torch.randint(0, 250, (3, length))
    layout = build_layout(ids, np.array([length] * 3), LayoutRules(packed, 1, 1))
    params = SegmentParams(segments=layout.segments) if packed else None
    with bypassed_output_layer(model), placed_positions(model, layout):
        return model(layout.input_ids, layout.positions, None, packed_seq_params=params)


def answers(architecture, length=9):
    """Loss, hidden states and gradients of a new model with biases that are not 0; the model."""
    model = new_model(architecture)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    hidden = hidden_states(model, length)
    loss = (hidden * torch.randn_like(hidden)).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "hidden": hidden.detach(), **gradients}, model


@pytest.mark.parametrize("groups", [2, 4])
def test_a_model_computes_the_same_without_them(groups, monkeypatch):
    attention = Mock(wraps=short_attention.short_attention)
    monkeypatch.setattr(short_attention, "short_attention", attention)
    architecture = dataclasses.replace(SMALL, num_query_groups=groups)
    found, _ = answers(architecture)
    assert attention.call_count == 2  # one of each layer
    monkeypatch.setattr(short_attention, "MAX_LENGTH", 0)
    monkeypatch.setattr(elementwise, "rms_norm", plain_rms_norm)
    monkeypatch.setattr(SwiGLU, "forward", lambda self, rows: plain_swiglu(rows))
    plain, _ = answers(architecture)
    assert attention.call_count == 2
    torch.testing.assert_close(found["loss"], plain["loss"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)


def kept_numbers(layers, packed, monkeypatch):
    """Numbers that a pass of 3 x 9 tokens keeps for backward, beside parameters."""
    monkeypatch.setattr(short_attention, "MAX_LENGTH", 0)
    model = new_model(dataclasses.replace(SMALL, num_layers=layers))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.dtype == torch.float32:
            kept[storage.data_ptr()] = storage  # held, so that no other comes to stand there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = hidden_states(model, packed=packed)
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values()) // 4


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_keeps_what_its_gradients_need_once(packed, monkeypatch):
    """No input of a linear beside what it was made of, no key or value for each query head."""
    hidden, ffn, heads, groups, width = 64, 128, 4, 2, 8
    norms = 2 * (hidden + 1)  # normalised rows and their scales
    attention = (heads + 2 * groups) * width + heads * width + heads  # with sums of exponentials
    layer = kept_numbers(3, packed, monkeypatch) - kept_numbers(2, packed, monkeypatch)
    rotary = 4 * (27 if packed else 9) * width  # sines and cosines, for queries and for keys
    assert layer == 3 * 9 * (norms + attention + 2 * ffn) + rotary


def test_a_layer_holds_nothing_after_its_call():
    model = new_model()
    hidden_states(model)
    linears = [module for module in model.modules() if isinstance(module, RowLinear | ColumnLinear)]
    assert len(linears) >= 8
    assert all(linear._origin is None for linear in linears)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_on_cpu_is_pytorch_s(groups, window):
    torch.manual_seed(7)
    query = torch.randn(2, 4, 7, 8, requires_grad=True)
    key, value = (torch.randn(2, groups, 7, 8, requires_grad=True) for _ in range(2))
    position = torch.arange(7)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or 7))
    out = attend_rows(query, key, value, window, scale=SCALE)
    inputs = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    plain = F.scaled_dot_product_attention(*inputs, attn_mask=seen, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(out.double(), plain, atol=1e-6, rtol=1e-6)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (query, key, value), grad)
    theirs = torch.autograd.grad(plain, inputs, grad.double())
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, check_dtype=False)


def test_scoring_computes_what_training_does():
    """Else the ratio of an unchanged policy would not be 1."""
    model = new_model()
    training = hidden_states(model)
    assert training.requires_grad
    with torch.no_grad():
        assert torch.equal(hidden_states(model), training)


def test_freed_memory_is_kept_or_nothing_happens(monkeypatch):
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert host_memory.keep_freed_memory.__wrapped__() is False


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [(TINY_ARCHITECTURE, False), (BIASED, True), (EXPERTS, False)],
    ids=["plain", "biased", "experts"],
)
def test_a_fused_model_is_the_same_model(architecture, biases, monkeypatch):
    plain, _ = answers(architecture, LONG)
    monkeypatch.setattr(megatron_attention, "apply_rotary_pos_emb", _apply_rotary)
    fused = Fusions(swiglu=True, rotary=True, bias=biases)
    monkeypatch.setattr(build.Fusions, "of", lambda *_: fused)
    monkeypatch.setattr(layer_spec, "can_group", lambda _: True)
    rotation = Mock(wraps=rotate)
    monkeypatch.setattr("aligner.models.gpt.layers.fusions.rotate", rotation)
    same, gpt = answers(architecture, LONG)
    assert rotation.call_count == 4 * architecture.num_layers  # query and key, there and back
    assert gpt.config.bias_activation_fusion
    assert plain.keys() == same.keys()
    for name, value in plain.items():
        largest = max(1e-6, value.abs().max().item())
        assert (same[name] - value).abs().max().item() <= 2e-5 * largest, name


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
    torch.testing.assert_close(*grads)
    assert not grads[0][2].any()
    assert grads[0][4].any()


def test_the_fused_rotation_rounds_once():
    angles = torch.rand(LONG, 1, 1, 8).repeat(1, 1, 1, 2) * LONG
    heads = torch.randn(LONG, 2, 3, 20)
    exact = _apply_rotary_pos_emb_bshd(heads.double(), angles.double())
    torch.testing.assert_close(rotate(heads, angles, 1.0).double(), exact, atol=1e-5, rtol=1e-5)
    low = heads.bfloat16()
    exact = _apply_rotary_pos_emb_bshd(low.double(), angles.double())
    fused, chain = (
        (rotated.double() - exact).abs().mean()
        for rotated in (rotate(low, angles, 1.0), _apply_rotary_pos_emb_bshd(low, angles))
    )
    assert fused < 0.7 * chain


@pytest.mark.extended
def test_the_rotation_can_be_compiled():
    half = torch.rand(LONG, 1, 1, 8)
    angles = torch.cat((half, half), dim=-1)
    with torch.compiler.set_stance("default"):
        for rows in (1, 2, 3):
            heads = torch.randn(LONG, rows, 3, 20)
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
