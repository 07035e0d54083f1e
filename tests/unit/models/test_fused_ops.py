"""Operations that training on CPU has in one piece, against the plain formulas.

1. Forward and gradient are those of the formula (float64, numerically and by autograd).
2. A model computes the same with and without them.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aligner.architecture import GPTArchitecture
from aligner.device import host_memory
from aligner.kernels.linear_product import ColumnLinear, RowLinear
from aligner.logprobs.output_layer import bypassed_output_layer
from aligner.models.gpt.forward.schedule import placed_positions
from aligner.models.gpt.forward.token_layout import LayoutRules, build_layout
from aligner.models.gpt.layers import elementwise, short_attention
from aligner.models.gpt.layers.attention import SegmentParams
from aligner.models.gpt.layers.dot_product import attend_rows
from aligner.models.gpt.layers.elementwise import SwiGLU, rms_norm, swiglu
from aligner.models.gpt.megatron.build import build_gpt
from aligner.parallel.groups import initialize_parallel

LENGTH, BATCH, GROUPS, WIDTH, ROTATED = 5, 2, 2, 6, 4
SCALE = 0.4


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


def test_swiglu_is_its_formula():
    torch.manual_seed(4)
    check(swiglu, plain_swiglu, torch.randn(3, 2, 8))


def test_rms_norm_is_its_formula():
    torch.manual_seed(5)
    check(
        lambda hidden, weight: rms_norm(hidden, weight, 1e-3),
        lambda hidden, weight: F.rms_norm(hidden, weight.shape, weight, 1e-3),
        torch.randn(3, 2, 8),
        torch.rand(8) + 0.5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_in_low_precision(dtype):
    torch.manual_seed(6)
    rows = torch.randn(64, 32).to(dtype).requires_grad_()
    reference = rows.detach().double().requires_grad_()
    out, expected = swiglu(rows), plain_swiglu(reference)
    out.sum().backward()
    expected.sum().backward()
    tolerance = 8 * torch.finfo(dtype).eps
    for ours, plain in ((out, expected), (rows.grad, reference.grad)):
        torch.testing.assert_close(ours.double(), plain, atol=tolerance, rtol=tolerance)


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


@pytest.mark.integration
@pytest.mark.parametrize("groups", [2, 4])
def test_a_model_computes_the_same_without_them(groups, monkeypatch):
    initialize_parallel()
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


@pytest.mark.integration
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_keeps_what_its_gradients_need_once(packed, monkeypatch):
    """No input of a linear beside what it was made of, no key or value for each query head."""
    initialize_parallel()
    hidden, ffn, heads, groups, width = 32, 48, 4, 2, 8
    norms = 2 * (hidden + 1)  # normalised rows and their scales
    attention = (heads + 2 * groups) * width + heads * width + heads  # with sums of exponentials
    layer = kept_numbers(3, packed, monkeypatch) - kept_numbers(2, packed, monkeypatch)
    rotary = 4 * (27 if packed else 9) * width  # sines and cosines, for queries and for keys
    assert layer == 3 * 9 * (norms + attention + 2 * ffn) + rotary


@pytest.mark.integration
def test_a_layer_holds_nothing_after_its_call():
    initialize_parallel()
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


@pytest.mark.integration
def test_scoring_computes_what_training_does():
    """Else the ratio of an unchanged policy would not be 1."""
    initialize_parallel()
    model = small_model(groups=2)
    training = hidden_states(model)
    assert training.requires_grad
    with torch.no_grad():
        assert torch.equal(hidden_states(model), training)


def test_freed_memory_is_kept_or_nothing_happens(monkeypatch):
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert host_memory.keep_freed_memory.__wrapped__() is False
