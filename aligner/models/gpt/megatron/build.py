"""Build a megatron-core `GPTModel` from a `GPTArchitecture`."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch import Tensor

from aligner.architecture import GPTArchitecture, RopeScaling, layer_flags
from aligner.config import ParallelConfig
from aligner.device import accelerator
from aligner.errors import ConfigError
from aligner.models.gpt.layers.fusions import Fusions, GPTConfig
from aligner.models.gpt.layers.layer_spec import (
    block_spec,
    has_transformer_engine,
    uses_transformer_engine,
)
from aligner.models.gpt.role.settings import RoleSettings

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "geglu": F.gelu,
    "geglu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
    # megatron-core's versions of the last and of this function are compiled and need gcc.
    "clamped_swiglu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


def transformer_config(
    architecture: GPTArchitecture, settings: RoleSettings | None = None, *, initialize: bool = True
) -> GPTConfig:
    """Convert architecture, layout and precision to megatron-core's configuration."""
    settings = settings or RoleSettings()
    check_fp8(settings)
    dtype, fp8, layers, lora = settings.dtype, settings.fp8, settings.layers, settings.lora
    recompute = settings.recompute
    fused = Fusions.of(architecture, layers.fusions)
    config = GPTConfig(
        **_network(architecture),
        **_experts(architecture, fp8),
        **_layout(settings.parallel),
        # An activation module is an option of our spec, not of Transformer Engine's MLP.
        use_te_activation_func=architecture.activation == "swiglu" and not fused.swiglu,
        bias_activation_fusion=fused.swiglu,
        rotates_in_one_kernel=fused.rotary,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        fp8=fp8,
        # Scales of the current tensors: unlike a history, they need no state when a run resumes.
        fp8_recipe="tensorwise" if fp8 else "delayed",
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not accelerator.has_gpu(),
        perform_initialization=initialize,
        # Losses are already divided by global counts: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        deterministic_mode=accelerator.has_gpu() and accelerator.is_deterministic(),
        gradient_accumulation_fusion=fused.gradient_sum,
        masked_softmax_fusion=False,  # only megatron-core's core attention uses it
        bias_dropout_fusion=fused.bias,
        apply_rope_fusion=False,  # its kernel uses the same positions in all rows of a batch
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )
    of_transformer_engine = uses_transformer_engine(layers.spec, lora, config)
    if fp8 and not of_transformer_engine and lora is None:
        raise ConfigError(
            f"model.fp8={fp8} is not supported for {architecture.family} models, whose layers "
            "Transformer Engine does not have. Set model.fp8=null"
        )
    config.use_te_activation_func &= not of_transformer_engine
    return config


# Settings that have the same names in `GPTArchitecture`.
_SAME_NAMES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "layernorm_epsilon", "qk_norm_over_heads", "branch_norms"),
    *("embedding_multiplier", "residual_multiplier", "logits_divisor", "window_rotary_base"),
    *("attention_cap", "is_scored", "attention_dropout", "hidden_dropout"),
    *("q_lora_rank", "kv_lora_rank", "value_channels", "rotated_channels"),
    *("num_moe_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_shared_expert_gate"),
)


def _network(architecture: GPTArchitecture) -> dict[str, Any]:
    scaling = architecture.rope_scaling
    return {
        **{name: getattr(architecture, name) for name in _SAME_NAMES},
        "activation_func": _ACTIVATIONS[architecture.activation],
        "gated_linear_unit": architecture.gated,
        "activation_func_clamp_value": architecture.activation_clamp,
        "glu_linear_offset": 1.0 if architecture.activation == "clamped_swiglu" else 0.0,
        "normalization": "RMSNorm" if "rmsnorm" in architecture.normalization else "LayerNorm",
        "layernorm_zero_centered_gamma": architecture.normalization.endswith("1p"),
        "no_rope_freq": layer_flags(architecture.layers_without_rope, architecture),
        # megatron-core multiplies cosines and sines by 1 + 0.1 * scale * ln(factor).
        "yarn_mscale": 10.0 * (architecture.rope_concentration - 1.0),
        "add_bias_linear": architecture.bias_linear,
        "add_qkv_bias": architecture.bias_qkv,
        "qk_layernorm": architecture.qk_layernorm and not architecture.qk_norm_over_heads,
        "softmax_scale": architecture.attention_scale,
        "softmax_type": "learnable" if architecture.attention_sinks else "vanilla",
        "window_size": (architecture.window_size - 1, 0) if architecture.window_size else None,
        "window_attn_skip_freq": layer_flags(
            architecture.layers_without_window, architecture, invert=True
        ),
        "rotary_scale": scaling.factor if scaling and scaling.kind == "linear" else 1.0,
        "init_method_std": architecture.init_std,
    }


def _experts(architecture: GPTArchitecture, fp8: str | None) -> dict[str, Any]:
    is_moe = architecture.num_moe_experts is not None
    dense = architecture.layers_without_experts
    experts = {
        "moe_layer_freq": layer_flags(dense, architecture, invert=True) or 1,
        "moe_ffn_hidden_size": architecture.expert_ffn_hidden_size if is_moe else None,
        "moe_shared_expert_intermediate_size": architecture.moe_shared_expert_size,
        "moe_router_dtype": "fp32",
        # No token is dropped, and ranks may dispatch different numbers of tokens.
        "moe_token_dispatcher_type": "alltoall",
        # The gradient of a balancing loss depends on how the batch is split into micro-batches, and
        # a pretrained router is balanced already.
        "moe_router_load_balancing_type": "none",
        "moe_router_padding_for_quantization": is_moe and fp8 is not None,
    }
    if not architecture.moe_router_sigmoid:
        return experts
    return experts | {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": architecture.moe_router_groups,
        "moe_router_group_topk": architecture.moe_router_group_topk,
        "moe_router_topk_scaling_factor": architecture.moe_router_scale,
        "moe_router_normalizes": architecture.moe_router_normalizes,
    }


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "num_layers_in_first_pipeline_stage": parallel.first_stage,
        "num_layers_in_last_pipeline_stage": parallel.last_stage,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1 if parallel.expert > 1 else None,
        "sequence_parallel": parallel.sequence_parallel,
        "variable_seq_lengths": parallel.pipeline > 1,
        "deallocate_pipeline_outputs": True,
    }


def check_fp8(settings: RoleSettings) -> None:
    """Raise if 8-bit matrix products are requested but not supported."""
    if settings.fp8 is None:
        return
    if settings.dtype != torch.bfloat16:
        fault = "needs trainer.precision=bf16. Set it"
    elif settings.layers.spec == "local":
        fault = "needs Transformer Engine, but model.layer_spec=local. Set model.layer_spec=auto"
    elif not (has_transformer_engine() and accelerator.has_fp8()):
        fault = (
            "needs Transformer Engine and a GPU with 8-bit matrix products (compute capability 8.9 "
            f"or more). This machine provides {accelerator.description()}, and Transformer Engine "
            f"is {'in use' if has_transformer_engine() else 'not in use'}. Use another machine"
        )
    else:
        return
    raise ConfigError(f"model.fp8={settings.fp8} {fault}, or set model.fp8=null")


def build_gpt(
    architecture: GPTArchitecture,
    settings: RoleSettings | None = None,
    *,
    initialize: bool = True,
    pre_process: bool = True,
    post_process: bool = True,
) -> GPTModel:
    """Build this process's share of the model on the accelerator's device.

    Process groups must have been initialised (`aligner.parallel.groups`). With ``initialize=False``
    the weights are uninitialised. ``lora`` adds adapters, with weights of zero.
    """
    settings = settings or RoleSettings()
    config = transformer_config(architecture, settings, initialize=initialize)
    layer_count = get_num_layers_to_build(config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, layer_count, settings.lora, settings.layers),
        vocab_size=architecture.padded_vocab_size(settings.parallel.tensor),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        position_embedding_type=architecture.position_embedding,
        rotary_percent=architecture.rotary_percent,
        rotary_base=architecture.rotary_base,
    )
    # megatron-core does not read the constants of the checkpoint.
    if architecture.rope_scaling is not None:
        rope = model.rotary_pos_emb
        rope.inv_freq = scaled_inverse_frequencies(
            rope.inv_freq, architecture.rope_scaling, architecture.rotary_base
        )
    if pre_process and architecture.position_embedding == "learned_absolute":
        # megatron-core ignores the dtype here, and float32 rows would promote all activations.
        model.embedding.position_embeddings.to(settings.dtype)
    if config.num_moe_experts and config.add_bias_linear:
        for name, parameter in model.named_parameters():
            if ".local_experts." in name and name.endswith("linear_fc2.bias"):
                # As the expert's weights: of this rank alone, from all tokens of the expert.
                parameter.sequence_parallel, parameter.tensor_model_parallel = False, True
    if not config.adds_plainly:
        for layer in model.decoder.layers:
            # Otherwise the addition would record gradients where the pass records none.
            layer.bias_dropout_add_exec_handler = contextlib.nullcontext
    if pre_process and architecture.embedding_multiplier != 1.0:
        factor = config.embedding_factor
        model.embedding.word_embeddings.register_forward_hook(
            lambda module, args, output: output * factor
        )
    if post_process and architecture.logits_cap is not None:
        # Only passes that return logits call the output layer. See `SamplingPolicy.logits_form`.
        cap = architecture.logits_cap
        model.output_layer.register_forward_hook(
            lambda module, args, output: (cap * torch.tanh(output[0] / cap), output[1])
        )
    if not initialize:
        _mark_tensor_parallel(model)
    return model.to(accelerator.device())


def _mark_tensor_parallel(model: GPTModel) -> None:
    """Set megatron-core's attributes of split weights, which the gradient norm reads."""
    split = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        for kind, dim in split.items():
            if isinstance(module, kind) and module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def scaled_inverse_frequencies(inverse: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Scale rotary frequencies, float32 [D_rot / 2], to a longer context.

    ``linear`` divides all frequencies by the factor (Chen et al. 2023), ``longrope`` each by its
    short factor (Ding et al. 2024). ``llama3`` divides low frequencies, keeps high ones, and
    interpolates between them by wavelength (Llama 3.1, 2024), ``yarn`` by the index of the
    frequency (Peng et al. 2023).
    """
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "longrope":
        return inverse / inverse.new_tensor(scaling.short_factor)
    if scaling.kind == "yarn":
        # Indices of the frequencies with `beta_fast` and `beta_slow` turns in the original context.
        count, context = len(inverse), scaling.original_max_position_embeddings / (2 * math.pi)
        first, last = (
            count * math.log(context / turns) / math.log(base)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, 2 * count - 1)
        index = torch.arange(count, dtype=inverse.dtype, device=inverse.device)
        scaled_share = ((index - low) / (high - low or 0.001)).clamp(0.0, 1.0)
        return inverse / scaling.factor * scaled_share + inverse * (1 - scaled_share)
    # llama3: frequencies with few turns in the original context are divided.
    turns = scaling.original_max_position_embeddings * inverse / (2 * torch.pi)
    interval = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share = ((turns - scaling.low_freq_factor) / interval).clamp(0.0, 1.0)
    return inverse / scaling.factor * (1 - kept_share) + inverse * kept_share
