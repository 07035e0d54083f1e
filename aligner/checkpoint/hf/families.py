"""Conversion between Hugging Face's ``config.json`` and `GPTArchitecture`, per model family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.hf import tensors
from aligner.checkpoint.hf.family import ORIGINAL, Config, Family
from aligner.errors import CheckpointError, raised_as

# architecture field → key of config.json
_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "attention_dropout": "attention_dropout",
}
_GPT2_KEYS = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "n_inner",
    "num_attention_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "layernorm_epsilon": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop",
}
# Fields that config.json lacks, or that matter only in training.
_NOT_CARRIED = {"make_vocab_size_divisible_by", "family", "hidden_dropout", "attention_dropout"}
# (key, fixed value or family, another value that transformers treats as equal)
_SAME: tuple[tuple[str, Any, Any], ...] = (
    *(("hidden_act", "silu", "swish"), ("hidden_act", "gemma", "gelu")),
    *(("mlp_only_layers", [], None), ("use_bidirectional_attention", None, False)),
)
_NO_WINDOW = {"use_sliding_window": False}
_WINDOW = {"window_size": "sliding_window"}
_LLAMA = Family(
    "llama",
    tensors.LLAMA_TABLE,
    {**_LLAMA_KEYS, "bias_linear": "attention_bias"},
    {"initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False}
    | {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
    | {"attention_bias": False, "mlp_bias": False},
    {"hidden_act": "silu"},
    equal={"mlp_bias": "attention_bias"},
)
# Families that differ from Llama by names, activation, norms or biases.
_PLAIN = dataclasses.replace(_LLAMA, keys=_LLAMA_KEYS, equal={})
_MISTRAL = _PLAIN.variant(
    "mistral",
    keys=_WINDOW,
    defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
)
_MIXTRAL = dataclasses.replace(_MISTRAL, table=tensors.MIXTRAL_TABLE).variant(
    "mixtral",
    keys={"num_moe_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    fixed={"router_jitter_noise": 0.0},
)
_QWEN2 = _PLAIN.variant(
    "qwen2",
    defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    fixed=_NO_WINDOW,
    implied={"bias_qkv": True},
)
_QWEN3 = _QWEN2.variant(
    "qwen3",
    defaults={"head_dim": 128},
    fixed={"attention_bias": False},
    implied={"bias_qkv": False, "qk_layernorm": True},
)
_QWEN3_MOE = dataclasses.replace(_QWEN3, table=tensors.QWEN3_MOE_TABLE).variant(
    "qwen3_moe",
    keys={"num_moe_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}
    | {"moe_ffn_hidden_size": "moe_intermediate_size"}
    | {"moe_router_pre_softmax": "norm_topk_prob"},  # negated
    defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8, "head_dim": None}
    | {"moe_intermediate_size": 768, "norm_topk_prob": False},
    fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
)
_BIAS_QKV = {"bias_qkv": "attention_bias"}
# Experts of GLM-4.5 and DeepSeek-V3.
_SIGMOID_ROUTER = {
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_size": "n_shared_experts",  # times moe_intermediate_size
    "layers_without_experts": "first_k_dense_replace",  # number of layers
    "moe_router_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_normalizes": "norm_topk_prob",
    "moe_router_scale": "routed_scaling_factor",
}
_SQUARED_RELU: dict[str, Any] = {
    "table": tensors.UNGATED_MLP,
    "fixed": {"hidden_act": "relu2"},
    "implied": {"activation": "squared_relu"},
}
_GLM = _PLAIN.variant(
    "glm",
    table={**tensors.INTERLEAVED_ROPE, **tensors.FUSED_GATE_UP},
    keys=_BIAS_QKV,
    defaults={"attention_bias": True, "rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2}
    | {"head_dim": 128, "max_position_embeddings": 131_072},
    rotary_percent=0.5,
)
_OLMO2 = _PLAIN.variant(
    "olmo2",
    table={
        **tensors.norms_after("post_attention_layernorm", "post_feedforward_layernorm"),
        **tensors.ALL_HEADS_NORM,
    },
    defaults={"rms_norm_eps": 1e-5},
    fixed={"attention_bias": False},
    implied={"branch_norms": "after", "qk_layernorm": True, "qk_norm_over_heads": True},
)
_GEMMA = _PLAIN.variant(
    "gemma",
    defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}
    | {"max_position_embeddings": 8192},
    fixed={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
    | {"use_bidirectional_attention": None},
    implied={"activation": "geglu_tanh", "normalization": "rmsnorm1p"},
    scales_embeddings=True,
)
_LLAMA_LIKE = (
    _LLAMA.variant(
        "nemotron",
        **_SQUARED_RELU
        | {"implied": {"activation": "squared_relu", "normalization": "layernorm1p"}},
        keys={"layernorm_epsilon": "norm_eps"},
        defaults={"norm_eps": 1e-5, "initializer_range": 0.0134, "max_position_embeddings": 4096},
        rotary_percent=0.5,
    ),
    _PLAIN.variant(
        "starcoder2",
        table=tensors.STARCODER2_MLP,
        keys={"bias_linear": "use_bias", "layernorm_epsilon": "norm_epsilon"}
        | {**_WINDOW, "hidden_dropout": "residual_dropout"},
        defaults={"use_bias": True, "norm_epsilon": 1e-5, "initializer_range": 0.018042}
        | {"num_key_value_heads": 2, "max_position_embeddings": 4096, "residual_dropout": 0.0}
        | {"tie_word_embeddings": True},
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        implied={"activation": "gelu_tanh", "normalization": "layernorm"},
    ),
    _PLAIN.variant(
        "phi3",
        table={**tensors.FUSED_QKV, **tensors.FUSED_GATE_UP},
        keys={**_WINDOW, "hidden_dropout": "resid_pdrop"},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "resid_pdrop": 0.0}
        | {ORIGINAL: 4096},
        rotary_percent=1.0,
    ),
    _PLAIN.variant(
        "stablelm",
        keys={"bias_qkv": "use_qkv_bias", "layernorm_epsilon": "layer_norm_eps"},
        defaults={"layer_norm_eps": 1e-5, "use_qkv_bias": False, "num_key_value_heads": 32}
        | {"max_position_embeddings": 4096},
        fixed={"use_parallel_residual": False, "qk_layernorm": False, "hidden_dropout": 0.0},
        implied={"normalization": "layernorm"},
        rotary_percent=0.25,
    ),
    _PLAIN.variant(
        "seed_oss",
        keys={**_BIAS_QKV, "hidden_dropout": "residual_dropout"},
        defaults={"attention_bias": True, "attention_dropout": 0.1, "residual_dropout": 0.1}
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288},
        fixed={"attention_out_bias": False, "mlp_bias": False},
    ),
    _LLAMA.variant(
        "arcee", **_SQUARED_RELU, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    ),
    _LLAMA.variant(
        "smollm3",
        keys={"layers_without_rope": "no_rope_layers"},
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2e6}
        | {"max_position_embeddings": 32_768, "no_rope_layers": None},
        fixed=_NO_WINDOW,
    ),
    _GLM,
    _PLAIN.variant(
        "ernie4_5",
        table=tensors.INTERLEAVED_ROPE,
        keys={"bias_linear": "use_bias"},
        defaults={"use_bias": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5}
        | {"max_position_embeddings": 131_072},
    ),
    _PLAIN.variant(
        "helium",
        table=tensors.INTERLEAVED_ROPE,
        keys=_BIAS_QKV,
        defaults={"attention_bias": False, "rms_norm_eps": 1e-8, "rope_theta": 1e5}
        | {"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096},
        fixed={"mlp_bias": False},
    ),
    _GLM.variant(
        "glm4",
        table=tensors.norms_after("post_self_attn_layernorm", "post_mlp_layernorm"),
        implied={"branch_norms": "both"},
    ),
    _OLMO2,
    _LLAMA.variant(
        "granite",
        keys={"attention_scale": "attention_multiplier", "logits_divisor": "logits_scaling"}
        | {name: name for name in ("embedding_multiplier", "residual_multiplier")},
        defaults={"attention_multiplier": 1.0, "logits_scaling": 1.0}
        | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    ),
    _GEMMA,
)
_GLM4_MOE = _PLAIN.variant(
    "glm4_moe",
    table=tensors.GLM4_MOE_TABLE,
    keys={**_BIAS_QKV, **_SIGMOID_ROUTER, "qk_layernorm": "use_qk_norm"},
    defaults={"attention_bias": False, "use_qk_norm": False, "rms_norm_eps": 1e-5}
    | {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "n_routed_experts": 128}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    | {"routed_scaling_factor": 1.0},
    implied={"moe_router_sigmoid": True},
    rotary_percent=0.5,
)
_DEEPSEEK_V3 = _GLM4_MOE.variant(
    "deepseek_v3",
    table=tensors.LATENT_ATTENTION,
    keys={"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank"}
    | {"value_channels": "v_head_dim"},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "n_routed_experts": 256}
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128, "qk_nope_head_dim": 128}
    | {"qk_rope_head_dim": 64, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5}
    | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    fixed={"attention_bias": False, "rope_interleave": True},
    implied={"qk_layernorm": False},
    rotary_percent=None,
)
_OLMO3 = _OLMO2.variant(
    "olmo3", keys=_WINDOW, defaults={"sliding_window": 4096, "rope_theta": 5e5}, window_pattern=4
)
_GEMMA_NORMS = tensors.norms_after(
    "post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm"
)
_GEMMA2 = _GEMMA.variant(
    "gemma2",
    table=_GEMMA_NORMS,
    keys={**_WINDOW, "attention_scale": "query_pre_attn_scalar"}
    | {"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"},
    defaults={"sliding_window": 4096, "query_pre_attn_scalar": 256, "num_key_value_heads": 4}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    implied={"branch_norms": "both"},
    window_pattern=2,
    rotates_alike=True,
)
_GEMMA3 = _GEMMA.variant(
    "gemma3_text",
    table=_GEMMA_NORMS,
    keys={**_WINDOW, "attention_scale": "query_pre_attn_scalar"},
    defaults={"sliding_window": 4096, "query_pre_attn_scalar": 256, "rope_theta": 1e6}
    | {"num_key_value_heads": 4, "max_position_embeddings": 131_072},
    fixed={"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": None}
    | {"attn_logit_softcapping": None},
    implied={"branch_norms": "both", "qk_layernorm": True},
    window_pattern=6,
    window_rotary_base=1e4,
)
_GPT_OSS = _PLAIN.variant(
    "gpt_oss",
    table=tensors.GPT_OSS_TABLE,
    keys={**_WINDOW, "activation_clamp": "swiglu_limit"}
    | {"num_moe_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
    defaults={"sliding_window": 128, "swiglu_limit": 7.0, "num_local_experts": 128}
    | {"num_experts_per_tok": 4, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 131_072, "rope_theta": 1.5e5}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, ORIGINAL: 4096}},
    fixed={"attention_bias": True, "swiglu_alpha": 1.702},
    implied={"activation": "clamped_swiglu", "bias_linear": True, "attention_sinks": True},
    window_pattern=2,
    rotates_alike=True,
)
_FAMILIES = (
    *(_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _MIXTRAL, _QWEN3_MOE),
    Family(
        "gpt2",
        tensors.GPT2_TABLE,
        _GPT2_KEYS,
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024}
        | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.02}
        | {"tie_word_embeddings": True},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
    *_LLAMA_LIKE,
    *(_OLMO3, _GEMMA2, _GEMMA3, _GLM4_MOE, _GPT_OSS, _DEEPSEEK_V3),
    _QWEN3_MOE.variant(
        "qwen2_moe",
        table=tensors.QWEN2_MOE_TABLE,
        keys={"moe_shared_expert_size": "shared_expert_intermediate_size"},
        defaults={"num_key_value_heads": 16, "num_experts_per_tok": 4, "num_experts": 60}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        fixed={"qkv_bias": True},
        implied={"bias_qkv": True, "qk_layernorm": False, "moe_shared_expert_gate": True},
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}


def family_of(model_type: object) -> Family:
    """Return the family of a ``model_type``, or raise `CheckpointError`."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type={model_type!r} is not supported. Supported families: "
            f"{', '.join(FAMILIES)} (SmolLM has model_type=llama)"
        )
    return FAMILIES[model_type]


def architecture_from_hf(config: Mapping[str, Any]) -> GPTArchitecture:
    """Return the architecture that ``config``, the content of a ``config.json``, describes.

    Raises `CheckpointError` for values that are missing, damaged or not supported.
    """
    family = family_of(config.get("model_type"))
    for key, value in family.fixed.items():
        setting = config.get(key, value)
        is_same = any((key, of, setting) in _SAME for of in (value, family.model_type))
        if setting != value and not is_same:
            raise CheckpointError(
                f"{key}={setting!r} in config.json is not supported for {family.model_type}. "
                f"Supported: {value!r}"
            )
    if quantised := config.get("quantization_config"):
        raise CheckpointError(
            f"the {family.model_type} model is quantised ({quantised.get('quant_method')}), and "
            "training needs full weights. Give the unquantised model"
        )
    damage = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
    with raised_as(CheckpointError, "config.json is incomplete or damaged", *damage):
        return family.read({**family.defaults, **config})


def config_to_hf(architecture: GPTArchitecture) -> tuple[Family, Config]:
    """Return the model family and the content of ``config.json`` for an architecture.

    If ``architecture.family`` is None, other fields determine the family. Raises `CheckpointError`
    if the family cannot express the architecture.
    """
    family = family_of(architecture.family or _guess(architecture))
    config = family.write(architecture)
    lost = _differences(architecture, family.read(config))
    if lost:
        raise CheckpointError(
            f"a config.json with model_type={family.model_type} cannot express {', '.join(lost)}. "
            f"Keep the model as .nemo, or use a supported family: {', '.join(FAMILIES)}"
        )
    return family, config


def _guess(architecture: GPTArchitecture) -> str:
    if architecture.position_embedding == "learned_absolute":
        return "gpt2"
    if architecture.normalization == "layernorm1p":
        return "nemotron"
    if architecture.normalization == "rmsnorm1p":
        return "gemma" if architecture.branch_norms == "before" else "gemma3_text"
    if architecture.moe_router_sigmoid:
        return "glm4_moe" if architecture.kv_lora_rank is None else "deepseek_v3"
    if architecture.num_moe_experts is not None:
        return "qwen3_moe" if architecture.qk_layernorm else "mixtral"
    if architecture.qk_layernorm:
        return "qwen3"
    if architecture.bias_qkv:
        return "qwen2"
    return "mistral" if architecture.window_size else "llama"


def _differences(expected: GPTArchitecture, actual: GPTArchitecture) -> list[str]:
    ignored = set(_NOT_CARRIED)
    if expected.position_embedding != "rope":
        ignored |= {"rotary_base", "rotary_percent", "rope_scaling"}
    # Fields of experts are compared only for mixtures of experts.
    if expected.num_moe_experts is not None:
        expected, actual = (
            dataclasses.replace(a, moe_ffn_hidden_size=a.expert_ffn_hidden_size)
            for a in (expected, actual)
        )
    else:
        ignored |= {"moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax"}
    return [
        f"{field.name}={getattr(expected, field.name)!r}"
        for field in dataclasses.fields(expected)
        if field.name not in ignored
        and getattr(expected, field.name) != getattr(actual, field.name)
    ]
