"""A GPT in float64, written from the formulas on canonical weights; shares no code with aligner."""

import math

import torch


def reference_logits(weights, architecture, tokens):
    """Logits float64 [B, S, V] of ``tokens`` int64 [B, S], one head at a time."""
    a = architecture
    w = {name: tensor.double() for name, tensor in weights.items()}
    length = tokens.shape[1]
    x = w["embedding.word_embeddings.weight"][tokens]
    if a.position_embedding == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][:length]
    for layer in range(a.num_layers):
        p = f"decoder.layers.{layer}."
        x = x + _attention(_norm(x, w, p + "input_layernorm", a), w, p + "self_attention.", a)
        x = x + _mlp(_norm(x, w, p + "pre_mlp_layernorm", a), w, p + "mlp.", a)
    x = _norm(x, w, "decoder.final_layernorm", a)
    tied = w["embedding.word_embeddings.weight"]
    return x @ (tied if a.tie_embeddings else w["output_layer.weight"]).T


def _norm(x, w, name, a):
    weight = w[f"{name}.weight"]
    if a.normalization == "rmsnorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + a.layernorm_epsilon) * weight
    if a.normalization == "layernorm1p":
        weight = weight + 1
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + a.layernorm_epsilon) * weight + w[f"{name}.bias"]


def _linear(x, w, name):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _attention(x, w, p, a):
    length, d = x.shape[1], a.kv_channels
    per_group = a.num_attention_heads // a.num_query_groups
    qkv = _linear(x, w, p + "linear_qkv")
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    outputs = []
    for head in range(a.num_attention_heads):
        start = (head // per_group) * (per_group + 2) * d
        q_start = start + (head % per_group) * d
        k_start = start + per_group * d
        q, k = qkv[..., q_start : q_start + d], qkv[..., k_start : k_start + d]
        v = qkv[..., k_start + d : k_start + 2 * d]
        if a.position_embedding == "rope":
            q, k = _rope(q, a), _rope(k, a)
        scores = (q @ k.transpose(1, 2)) / math.sqrt(d)
        outputs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v)
    return _linear(torch.cat(outputs, -1), w, p + "linear_proj")


def _rope(x, a):
    rotated = int(x.shape[-1] * a.rotary_percent)
    half = rotated // 2
    frequency = a.rotary_base ** (-torch.arange(half, dtype=torch.float64) * 2 / rotated)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    first, second, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _mlp(x, w, p, a):
    h = _linear(x, w, p + "linear_fc1")
    if a.activation == "swiglu":
        gate, up = h.chunk(2, -1)
        h = gate * torch.sigmoid(gate) * up
    elif a.activation == "gelu":
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    elif a.activation == "gelu_tanh":
        h = h * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    elif a.activation == "squared_relu":
        h = h.clamp(min=0) ** 2
    else:
        raise NotImplementedError(a.activation)
    return _linear(h, w, p + "linear_fc2")
