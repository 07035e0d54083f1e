"""Modules of a transformer layer.

With Transformer Engine and a GPU it is megatron-core's Transformer Engine spec with our core
attention, unless ``model.layer_spec`` asks for another; else our local one: megatron-core's linear
layers with a norm that admits sequence parallelism and that core attention (megatron-core's own
local spec refuses the first and has none that is fused).
"""

import functools
import importlib.util

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from aligner.config import LayerOptions, LayerSpec, LoraConfig
from aligner.distributed import accelerator
from aligner.errors import ConfigError
from aligner.kernels.parallel_linear import ColumnLinear, RowLinear
from aligner.models.gpt.layers.attention import CoreAttention
from aligner.models.gpt.layers.elementwise import SwiGLU, rms_norm
from aligner.models.gpt.layers.grouped_experts import GroupedExperts, can_group
from aligner.models.gpt.layers.short_attention import ShortSelfAttention
from aligner.models.gpt.lora.linear import LoraColumnParallelLinear, LoraRowParallelLinear


class Norm(nn.Module):
    """LayerNorm, LayerNorm1P (weight stored minus one) or RMSNorm, by the config.

    Its parameters are marked ``sequence_parallel``, so that megatron-core sums their gradients
    over tensor-parallel ranks that each saw a part of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.is_rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if self.zero_centered:
            nn.init.zeros_(self.weight)
        self.bias = (
            None
            if self.is_rms
            else nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        )
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension of ``hidden`` [..., H]; same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.is_rms:
            # In bf16 torch's own computes in float32 inside.
            single = hidden.dtype == weight.dtype == torch.float32
            if single and hidden.device.type == "cpu":
                return rms_norm(hidden, weight, self.eps)
            return F.rms_norm(hidden, weight.shape, weight, self.eps)
        return F.layer_norm(hidden, weight.shape, weight, self.bias, self.eps)


@functools.cache
def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and there is a GPU to run it on."""
    return accelerator.has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def uses_transformer_engine(spec: LayerSpec = "auto", lora: LoraConfig | None = None) -> bool:
    """Return whether layers are Transformer Engine's; its fused linears take no adapters."""
    if spec == "transformer_engine" and not has_transformer_engine():
        raise ConfigError(
            "model.layer_spec=transformer_engine needs Transformer Engine and a GPU; here is "
            f"{accelerator.description()}"
            + ("" if accelerator.has_gpu() else ", no GPU")
            + ". Install transformer_engine[pytorch], or set model.layer_spec=auto"
        )
    return spec != "local" and has_transformer_engine() and lora is None


def moe_spec(config: TransformerConfig, linears: MLPSubmodules, grouped: bool) -> ModuleSpec:
    """Experts of these linears; ``grouped``: by grouped products, where there are any."""
    kind = GroupedExperts if grouped and can_group(config) else SequentialMLP
    experts = ModuleSpec(module=kind, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))


def local_layer_spec(
    config: TransformerConfig, lora: LoraConfig | None = None, *, fusions: bool = True
) -> ModuleSpec:
    """One transformer layer of megatron-core linears, `Norm` and `CoreAttention`."""

    def linear(name: str, plain: type, adapted: type) -> type | ModuleSpec:
        if lora is None or name not in lora.linears:
            return plain
        return ModuleSpec(module=adapted, params={"lora": lora})

    def column(name: str) -> type | ModuleSpec:
        return linear(name, ColumnLinear, LoraColumnParallelLinear)

    def row(name: str) -> type | ModuleSpec:
        return linear(name, RowLinear, LoraRowParallelLinear)

    linears = MLPSubmodules(
        linear_fc1=column("mlp.linear_fc1"),
        # Used where the config asks for an activation of one piece.
        activation_func=SwiGLU,
        linear_fc2=row("mlp.linear_fc2"),
    )
    if config.num_moe_experts:
        mlp = moe_spec(config, linears, fusions and lora is None)
    else:
        mlp = ModuleSpec(module=MLP, submodules=linears)
    qk_norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=ShortSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column("self_attention.linear_qkv"),
                    core_attention=CoreAttention,
                    linear_proj=row("self_attention.linear_proj"),
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    config: TransformerConfig,
    num_local_layers: int,
    lora: LoraConfig | None = None,
    layers: LayerOptions | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage and its final norm."""
    layers = layers or LayerOptions()
    if uses_transformer_engine(layers.spec, lora):
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
        # Generation keeps its cache in our core attention, which is flash attention on a GPU too.
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
        if layers.fusions and config.num_moe_experts and can_group(config):
            linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
            layer.submodules.mlp = moe_spec(config, linears, grouped=True)
        return TransformerBlockSubmodules([layer] * num_local_layers, layer_norm=TENorm)
    layer = local_layer_spec(config, lora, fusions=layers.fusions)
    return TransformerBlockSubmodules([layer] * num_local_layers, layer_norm=Norm)
