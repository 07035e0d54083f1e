"""Operations that are one piece on a CPU, or one kernel on a GPU, against the plain formulas."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer import attention as megatron_attention

from aligner.architecture import GPTArchitecture
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


def rotated(heads, table):
    turned, passed = heads[..., :ROTATED], heads[..., ROTATED:]
    first, second = turned.chunk(2, dim=-1)
    other = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * table.cos() + other * table.sin(), passed), dim=-1)


def plain_attention(mixed, table):
    queries = mixed.shape[3] - 2
    query, key, value = mixed.split([queries, 1, 1], dim=3)
    query, key = (rotated(part.flatten(2, 3), table) for part in (query, key))
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


def plain_rms_norm(hidden, weight):
    return F.rms_norm(hidden, weight.shape, weight, 1e-3)


def check(ours, plain, *inputs):
    inputs = [value.double().requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(ours, inputs)
    out = plain(*inputs)
    torch.testing.assert_close(ours(*inputs), out)
    grad = torch.randn_like(out)
    for result in zip(
        torch.autograd.grad(ours(*inputs), inputs, grad),
        torch.autograd.grad(out, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(*result)


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
    check(partial(rms_norm, eps=1e-3), plain_rms_norm, hidden, weight)


def small_model(groups, layers=2):
    architecture = GPTArchitecture(
        num_layers=layers,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=groups,
        kv_channels=8,
        vocab_size=64,
        max_position_embeddings=16,
        family="llama",
    )
    torch.manual_seed(0)
    return build_gpt(architecture).train()


def hidden_states(model, packed=False):
    """Of three sequences of nine tokens."""
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (3, 9))
    layout = build_layout(ids, np.array([9, 9, 9]), LayoutRules(packed, 1, 1))
    params = SegmentParams(segments=layout.segments) if packed else None
    with bypassed_output_layer(model), placed_positions(model, layout):
        return model(layout.input_ids, layout.positions, None, packed_seq_params=params)


def loss_and_gradients(groups):
    model = small_model(groups)
    hidden = hidden_states(model)
    loss = (hidden * torch.randn_like(hidden)).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize("groups", [2, 4])
def test_a_model_computes_the_same_without_them(groups, monkeypatch):
    calls = []
    attention = short_attention.short_attention
    monkeypatch.setattr(
        short_attention, "short_attention", lambda *args: calls.append(1) or attention(*args)
    )
    loss, gradients = loss_and_gradients(groups)
    assert len(calls) == 2  # one of each layer
    monkeypatch.setattr(short_attention, "MAX_LENGTH", 0)
    monkeypatch.setattr(
        elementwise,
        "rms_norm",
        lambda hidden, weight, eps: F.rms_norm(hidden, weight.shape, weight, eps),
    )
    monkeypatch.setattr(SwiGLU, "forward", lambda self, rows: plain_swiglu(rows))
    plain_loss, plain_gradients = loss_and_gradients(groups)
    assert len(calls) == 2
    torch.testing.assert_close(loss, plain_loss, atol=1e-6, rtol=1e-6)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], atol=1e-6, rtol=1e-5, msg=name)


def kept_numbers(layers, packed, monkeypatch):
    """Numbers that a pass of 3 x 9 tokens keeps for backward, beside parameters."""
    monkeypatch.setattr(short_attention, "MAX_LENGTH", 0)
    model = small_model(groups=2, layers=layers)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.dtype == torch.float32:
            kept[storage.data_ptr()] = storage  # held, so that no other comes to stand there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = hidden_states(model, packed)
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values()) // 4


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_keeps_what_its_gradients_need_once(packed, monkeypatch):
    """No input of a linear beside what it was made of, no key or value for each query head."""
    hidden, ffn, heads, groups, width = 32, 48, 4, 2, 8
    norms = 2 * (hidden + 1)  # normalised rows and their scales
    attention = (heads + 2 * groups) * width + heads * width + heads  # with sums of exponentials
    layer = kept_numbers(3, packed, monkeypatch) - kept_numbers(2, packed, monkeypatch)
    rotary = 4 * (27 if packed else 9) * width  # sines and cosines, for queries and for keys
    assert layer == 3 * 9 * (norms + attention + 2 * ffn) + rotary


def test_a_layer_holds_nothing_after_its_call():
    model = small_model(groups=2)
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
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)


def test_scoring_computes_what_training_does():
    """Else the ratio of an unchanged policy would not be 1."""
    model = small_model(groups=2)
    training = hidden_states(model)
    assert training.requires_grad
    with torch.no_grad():
        assert torch.equal(hidden_states(model), training)


def test_freed_memory_is_kept_or_nothing_happens(monkeypatch):
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert host_memory.keep_freed_memory.__wrapped__() is False


def answers(architecture):
    torch.manual_seed(3)
    gpt = build_gpt(architecture).train()
    for name, parameter in gpt.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 256, (2, LONG))
    positions = torch.arange(LONG).expand(2, -1)
    with bypassed_output_layer(gpt):
        hidden = gpt(tokens, positions, None)
    hidden.square().mean().backward()
    grads = {name: each.grad for name, each in gpt.named_parameters() if each.grad is not None}
    return {"hidden": hidden.detach(), **grads}, gpt


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
