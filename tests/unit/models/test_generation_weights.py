"""Whose weights the short cut of generation takes, and what is switched off while it generates.

Transformer Engine is not installed here. `Fused` has the names and the shapes of its linear layers
(`LayerNormLinear`, `Linear`) and cannot be called: what is compared is what the short cut makes of
its parameters.
"""

import dataclasses

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from test_generation import LLAMA, make_model, make_prompts, run
from torch import nn

from aligner.models.gpt.decode.model import without_gradients

pytestmark = pytest.mark.integration

VARIANTS = {
    "llama": LLAMA,
    "layernorm1p": dataclasses.replace(LLAMA, normalization="layernorm1p", bias_qkv=True),
    "layernorm, biases": dataclasses.replace(LLAMA, normalization="layernorm", bias_linear=True),
}


class Fused(nn.Module):
    """Parameters as Transformer Engine keeps them; an empty tensor stands for no bias."""

    def __init__(self, linear, norm=None):
        super().__init__()
        self.weight = linear.weight
        self.bias = torch.empty(0) if linear.bias is None else linear.bias
        if norm is not None:
            self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias
            self.eps, self.zero_centered_gamma = norm.eps, norm.zero_centered
            self.normalization = "RMSNorm" if norm.is_rms else "LayerNorm"


Fused.__module__ = "transformer_engine.pytorch.module.layernorm_linear"


def make_fused_model(variant):
    """The model of `make_model`, which has the same weights each time."""
    gpt, architecture = make_model(variant)
    for layer in gpt.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv = Fused(attention.linear_qkv, layer.input_layernorm)
        attention.linear_proj = Fused(attention.linear_proj)
        mlp.linear_fc1 = Fused(mlp.linear_fc1, layer.pre_mlp_layernorm)
        mlp.linear_fc2 = Fused(mlp.linear_fc2)
        layer.input_layernorm, layer.pre_mlp_layernorm = IdentityOp(), IdentityOp()
    return gpt, architecture


@pytest.mark.parametrize("name", VARIANTS)
def test_fused_norms_and_linears_draw_the_same_tokens(name):
    model = make_model(VARIANTS[name])
    prompts, lengths = make_prompts()
    expected = run(model, prompts, lengths)
    found = run(make_fused_model(VARIANTS[name]), prompts, lengths)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=3e-5, rtol=0)


def test_weights_kept_in_8_bits_are_left_to_their_modules():
    """They are no plain parameters; the module itself is called, which `Fused` cannot be."""

    class EightBit(nn.Parameter):
        pass

    model = make_fused_model(LLAMA)
    linear = model[0].decoder.layers[0].mlp.linear_fc2
    linear.weight = EightBit(linear.weight.data)
    with pytest.raises(NotImplementedError):
        run(model, *make_prompts())


def test_inference_mode_where_transformer_engine_is_not_used():
    with without_gradients(make_model(LLAMA)[0]):
        assert torch.is_inference_mode_enabled()
    with without_gradients(make_fused_model(LLAMA)[0]):
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


def test_generation_multiplies_no_8_bit_numbers(monkeypatch):
    """Transformer Engine takes multiples of 8 rows; here 4 sequences are in flight, then fewer."""
    monkeypatch.setattr(
        "aligner.models.gpt.decode.model.incremental_layers", lambda gpt, products: None
    )
    gpt, architecture = make_model(LLAMA)
    gpt.config.fp8 = "hybrid"
    seen = []
    gpt.decoder.register_forward_pre_hook(lambda *_: seen.append(gpt.config.fp8))
    run((gpt, architecture), *make_prompts())
    assert set(seen) == {None}
    assert gpt.config.fp8 == "hybrid"
