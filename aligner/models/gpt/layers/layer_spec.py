"""Modules of a transformer layer.

With Transformer Engine and a GPU it is megatron-core's Transformer Engine spec with our core
attention, unless ``model.layer_spec`` asks for another; else our local one: megatron-core's linear
layers with a norm that admits sequence parallelism and that core attention (megatron-core's own
local spec refuses the first and has none that is fused).

Experts of a layer take one grouped matrix product each way, instead of one per expert. Their
weights stay parameters of their own, as megatron-core's `SequentialMLP` has them: checkpoints,
optimizer and run states do not see a difference. They are joined for a product and joined again for
its gradient, so that one layer's copy is alive at a time.
"""

import functools
import importlib.util
from types import SimpleNamespace
from typing import Any

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
from torch.autograd.function import once_differentiable

from aligner.config import LayerOptions, LayerSpec, LoraConfig
from aligner.device import accelerator
from aligner.errors import ConfigError
from aligner.kernels.linear_product import ColumnLinear, RowLinear
from aligner.logprobs.output_layer import ready_weight
from aligner.models.gpt.layers.attention import CoreAttention
from aligner.models.gpt.layers.elementwise import Norm, SwiGLU
from aligner.models.gpt.layers.short_attention import ShortSelfAttention
from aligner.models.gpt.lora import LoraColumnParallelLinear, LoraRowParallelLinear

_MULTIPLE = 8  # of the columns of bf16 matrices: rows begin at multiples of 16 bytes


class _GroupedLinear(torch.autograd.Function):
    """Rows ``[n, in]`` sorted by expert, times its weight ``[out, in]``: ``[n, out]``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ends: Tensor, counts: list[int], *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        ctx.counts = counts
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[3:]):
            joined = F.grouped_mm(grad.t(), rows, offs=ends)
            for expert, count in enumerate(ctx.counts):
                if count == 0:  # a product of nothing is left unwritten
                    joined[expert].zero_()
            grad_weights = list(joined.unbind())
        return (grad_rows, None, None, *grad_weights)


class GroupedExperts(SequentialMLP):
    """`SequentialMLP` in two grouped products, whatever the number of experts."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Float rows ``[n, H]`` sorted by expert, their weights ``[n]``, numbers of each ``[E]``.

        Returns ``[n, H]`` and no bias.
        """
        experts, one = self.local_experts, self.local_experts[0]
        # Where a linear communicates by itself, its product is not all of it.
        alone = one.linear_fc1.explicit_expert_comm or self.tp_group.size() == 1
        if len(experts) == 1 or not alone or not permuted_local_hidden_states.shape[0]:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        ends = ends.to(permuted_local_hidden_states.device, non_blocking=True)

        def grouped(linears: list[nn.Module]) -> Any:
            def product(rows: Tensor) -> tuple[Tensor, None]:
                weights = [ready_weight(linear) for linear in linears]
                return _GroupedLinear.apply(rows, ends, counts, *weights), None

            return product

        mlp = SimpleNamespace(
            config=one.config,
            activation_func=one.activation_func,
            linear_fc1=grouped([expert.linear_fc1 for expert in experts]),
            linear_fc2=grouped([expert.linear_fc2 for expert in experts]),
        )
        return MLP.forward(mlp, permuted_local_hidden_states, permuted_probs)


def can_group(config: TransformerConfig) -> bool:
    """Return whether there is a kernel for these experts: bf16 on a GPU, without biases."""
    widths = (config.hidden_size, config.moe_ffn_hidden_size or 0)
    return (
        accelerator.has_gpu()
        and config.params_dtype == torch.bfloat16
        and config.fp8 is None
        and not config.add_bias_linear
        and not config.moe_apply_probs_on_input
        and all(width % _MULTIPLE == 0 for width in widths)
    )


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
