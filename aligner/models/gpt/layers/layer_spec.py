"""Modules of a transformer layer.

With Transformer Engine and a GPU, the layer is megatron-core's Transformer Engine spec with our
core attention, unless ``model.layer_spec`` selects another. The local spec has megatron-core's
linears, `Norm` and `CoreAttention`.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.nn.functional
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aligner.config import LayerOptions, LayerSpec, LoraConfig
from aligner.device import accelerator
from aligner.errors import ConfigError
from aligner.kernels.linear_product import ColumnLinear, RowLinear
from aligner.logprobs.output_layer import ready_weight
from aligner.models.gpt.layers.attention import CoreAttention
from aligner.models.gpt.layers.elementwise import Norm, SwiGLU
from aligner.models.gpt.layers.fusions import GPTConfig
from aligner.models.gpt.layers.scored_attention import ScoredAttention
from aligner.models.gpt.layers.short_attention import ShortSelfAttention
from aligner.models.gpt.lora import LoraColumnParallelLinear, LoraRowParallelLinear

_COLUMN_MULTIPLE = 8  # bf16 columns, so that matrix rows are aligned to 16 bytes


class FinalNorm(Norm):
    """`Norm` before the output layer, whose result is divided by ``logits_divisor`` (Granite)."""

    def __init__(self, config: GPTConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.divisor = config.logits_divisor

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension of ``hidden`` [..., H], and divide by ``logits_divisor``."""
        return super().forward(hidden) / self.divisor


class AllHeadsNorm(nn.Module):
    """RMSNorm whose mean is over all heads of all tensor-parallel ranks (OLMo 2)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int
    ) -> None:
        super().__init__()
        self.size, self.eps = heads * hidden_size, eps
        self.ranks = config.tensor_model_parallel_size
        weight = nn.Parameter(torch.ones(self.size // self.ranks, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(weight, True, 0, 1)
        self.all_heads = nn.ParameterDict({"weight": weight})

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise float ``heads`` ``[S, B, N, D]`` over N and D. The shape does not change."""
        rows = heads.flatten(2).float()
        squares = rows.square().sum(-1, keepdim=True)
        if self.ranks > 1:  # a sum in both directions, because every rank uses the result
            group = parallel_state.get_tensor_model_parallel_group()
            squares = torch.distributed.nn.functional.all_reduce(squares, group=group)
        normal = rows * (squares / self.size + self.eps).rsqrt()
        return (normal * self.all_heads["weight"]).to(heads.dtype).view_as(heads)


class BranchAdd(nn.Module):
    """Addition of a branch (attention or MLP) to the residual, with a norm and a multiplier."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.norm = nn.Identity() if config.branch_norms == "before" else Norm(config, size, eps)
        self.multiplier = config.residual_multiplier

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return a function of (branch, its bias), residual and dropout that computes the sum."""

        def add(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            out, bias = branch
            out = self.norm(out if bias is None else out + bias) * self.multiplier
            return residual + F.dropout(out, dropout, training)

        return add


class _GroupedLinear(torch.autograd.Function):
    """Product of rows ``[n, in]``, sorted by expert, and each expert's weight ``[out, in]``."""

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
            stacked = F.grouped_mm(grad.t(), rows, offs=ends)
            for expert, count in enumerate(ctx.counts):
                if count == 0:  # the kernel does not write the product of zero rows
                    stacked[expert].zero_()
            grad_weights = list(stacked.unbind())
        return (grad_rows, None, None, *grad_weights)


class GroupedExperts(SequentialMLP):
    """`SequentialMLP` that computes all experts by two grouped matrix products.

    Each expert has separate parameters, as in checkpoints. They are stacked for each product.
    """

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Apply the experts to rows, float ``[n, H]``, sorted by expert. Returns no bias.

        ``tokens_per_expert``: ``[E]``. ``permuted_probs``: float ``[n]``, router weight of a row.
        """
        experts, first = self.local_experts, self.local_experts[0]
        # A linear layer that communicates computes more than its product.
        is_product = first.linear_fc1.explicit_expert_comm or self.tp_group.size() == 1
        if len(experts) == 1 or not is_product or not permuted_local_hidden_states.shape[0]:
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
            config=first.config,
            activation_func=first.activation_func,
            linear_fc1=grouped([expert.linear_fc1 for expert in experts]),
            linear_fc2=grouped([expert.linear_fc2 for expert in experts]),
        )
        return MLP.forward(mlp, permuted_local_hidden_states, permuted_probs)


class BiasedRowLinear(RowLinear):
    """`RowLinear` of an expert, to whose output megatron-core adds the bias in place."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply ``input_``, float ``[n, in]``. Returns a copy of the product, and the bias."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def can_group(config: TransformerConfig) -> bool:
    """Return whether grouped products support the experts: bf16 on a GPU, without biases."""
    widths = (config.hidden_size, config.moe_ffn_hidden_size or 0)
    return (
        accelerator.has_gpu()
        and config.params_dtype == torch.bfloat16
        and config.fp8 is None
        and not config.add_bias_linear
        and not config.moe_apply_probs_on_input
        and all(width % _COLUMN_MULTIPLE == 0 for width in widths)
    )


@functools.cache
def has_transformer_engine() -> bool:
    """Return whether Transformer Engine and a GPU are available."""
    return accelerator.has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def uses_transformer_engine(spec: LayerSpec, lora: LoraConfig | None, config: GPTConfig) -> bool:
    """Return whether layers use Transformer Engine.

    Its layers do not support adapters, norms over all heads or after a branch, a second rotary
    base, soft caps, sinks and this library's latent attention.
    """
    if spec == "transformer_engine" and not has_transformer_engine():
        raise ConfigError(
            "model.layer_spec=transformer_engine needs Transformer Engine and a GPU. This "
            f"machine provides {accelerator.description()}"
            + ("" if accelerator.has_gpu() else ", no GPU")
            + ". Install transformer_engine[pytorch], or set model.layer_spec=auto"
        )
    plain = config.adds_plainly and not config.qk_norm_over_heads and not config.is_scored
    plain = plain and config.window_rotary_base is None and config.kv_lora_rank is None
    return spec != "local" and has_transformer_engine() and lora is None and plain


def moe_spec(config: TransformerConfig, linears: MLPSubmodules, grouped: bool) -> ModuleSpec:
    """Return the spec of experts. ``grouped``: use `GroupedExperts` where it is supported."""
    if config.add_bias_linear:
        linears = dataclasses.replace(linears, linear_fc2=BiasedRowLinear)
    kind = GroupedExperts if grouped and can_group(config) else SequentialMLP
    experts = ModuleSpec(module=kind, submodules=linears)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
    submodules = MoESubmodules(experts=experts, shared_experts=shared)
    return _routed(config, ModuleSpec(module=MoELayer, submodules=submodules))


def _routed(config: TransformerConfig, experts: ModuleSpec) -> ModuleSpec:
    if config.moe_router_score_function == "sigmoid":
        from aligner.models.gpt.layers.sigmoid_router import SigmoidRouter

        experts.submodules.router = SigmoidRouter
    return experts


def local_layer_spec(
    config: GPTConfig,
    lora: LoraConfig | None = None,
    *,
    fusions: bool = True,
    has_experts: bool = False,
) -> ModuleSpec:
    """Return the spec of a layer with megatron-core's linears, `Norm` and `CoreAttention`."""

    def linear(name: str, plain: type, adapted: type) -> type | ModuleSpec:
        if lora is None or name not in lora.linears:
            return plain
        return ModuleSpec(module=adapted, params={"lora": lora})

    # The MLP, dense or of experts.
    column, row = (ColumnLinear, LoraColumnParallelLinear), (RowLinear, LoraRowParallelLinear)
    linears = MLPSubmodules(
        linear_fc1=linear("mlp.linear_fc1", *column),
        activation_func=SwiGLU,  # used if ``config.use_te_activation_func``
        linear_fc2=linear("mlp.linear_fc2", *row),
    )
    if has_experts:
        mlp = moe_spec(config, linears, fusions and lora is None)
    else:
        mlp = ModuleSpec(module=MLP, submodules=linears)
    # Norms, and the sum of a branch with the residual stream.
    norm = IdentityOp if config.branch_norms == "after" else Norm
    qk_norms: list[type | ModuleSpec] = [Norm if config.qk_layernorm else IdentityOp] * 2
    if config.qk_norm_over_heads:
        heads = (config.num_attention_heads, config.num_query_groups)
        qk_norms = [ModuleSpec(AllHeadsNorm, {"heads": count}) for count in heads]
    attention = ModuleSpec(
        module=ShortSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear("self_attention.linear_qkv", *column),
            core_attention=ScoredAttention if config.is_scored else CoreAttention,
            linear_proj=linear("self_attention.linear_proj", *row),
            q_layernorm=qk_norms[0],
            k_layernorm=qk_norms[1],
        ),
    )
    if config.kv_lora_rank is not None:
        from aligner.models.gpt.layers import latent_attention

        attention.module = latent_attention.LatentAttention
        attention.submodules.core_attention = latent_attention.NarrowValueAttention
    add = get_bias_dropout_add
    if not config.adds_plainly:
        add = ModuleSpec(BranchAdd, {"config": config})
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=add,
        ),
    )


def block_spec(
    config: GPTConfig,
    num_local_layers: int,
    lora: LoraConfig | None = None,
    layers: LayerOptions | None = None,
) -> TransformerBlockSubmodules:
    """Return the spec of one pipeline stage: its layers and the final norm."""
    layers = layers or LayerOptions()
    if uses_transformer_engine(layers.spec, lora, config):
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        layer_of = functools.partial(_engine_layer_spec, config, fusions=layers.fusions)
    else:
        norm = Norm
        layer_of = functools.partial(local_layer_spec, config, lora, fusions=layers.fusions)
    # The MLP of each layer, from the first of this stage.
    specs = [layer_of(has_experts=config.num_moe_experts is not None)] * num_local_layers
    if isinstance(config.moe_layer_freq, list):
        first = get_transformer_layer_offset(config)
        flags = config.moe_layer_freq[first : first + num_local_layers]
        specs = [layer_of(has_experts=bool(flag)) for flag in flags]
    final = norm if config.logits_divisor == 1.0 else FinalNorm
    return TransformerBlockSubmodules(specs, layer_norm=final)


def _engine_layer_spec(config: GPTConfig, *, fusions: bool, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
    )
    # Generation attaches its cache to our core attention, also flash attention on a GPU.
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    if has_experts:
        _routed(config, layer.submodules.mlp)
    if fusions and has_experts and can_group(config):
        linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        layer.submodules.mlp = moe_spec(config, linears, grouped=True)
    return layer
