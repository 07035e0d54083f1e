"""Hugging Face's ``config.json`` in and out of `GPTArchitecture`, a row per model family."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aligner.architecture import Activation, GPTArchitecture, RopeScaling
from aligner.checkpoint.hf.tensors import (
    GPT2_TABLE,
    LLAMA_TABLE,
    MIXTRAL_TABLE,
    QWEN3_MOE_TABLE,
    Table,
)
from aligner.errors import CheckpointError

Config = dict[str, Any]

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
_GPT2_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
# Settings that config.json lacks, or that matter only in training.
_NOT_CARRIED = {"make_vocab_size_divisible_by", "family", "hidden_dropout", "attention_dropout"}


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    ``defaults`` are transformers' values for keys that ``config.json`` leaves out; ``fixed`` are
    keys that must have this value (absent counts as such), because others are not supported.
    """

    model_type: str
    model_class: str
    table: Table
    read: Callable[[Config], GPTArchitecture]
    write: Callable[[GPTArchitecture], Config]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]


def _read_llama(config: Config) -> GPTArchitecture:
    fields: dict[str, Any] = {field: config.get(key) for field, key in _LLAMA_KEYS.items()}
    heads = fields["num_attention_heads"]
    fields["num_query_groups"] = fields["num_query_groups"] or heads
    fields["kv_channels"] = fields["kv_channels"] or fields["hidden_size"] // heads
    base, scaling = _read_rope(config)
    biases = {bool(config.get("attention_bias")), bool(config.get("mlp_bias"))}
    if len(biases) > 1:
        raise CheckpointError(
            "attention_bias and mlp_bias differ in config.json; supported are both or neither"
        )
    return GPTArchitecture(
        **fields,
        activation="swiglu",
        normalization="rmsnorm",
        position_embedding="rope",
        rotary_base=base,
        rope_scaling=scaling,
        bias_linear=biases.pop(),
        bias_qkv=config["model_type"] == "qwen2",
        qk_layernorm=config["model_type"] in ("qwen3", "qwen3_moe"),
        window_size=config.get("sliding_window") if config["model_type"] in _WINDOWED else None,
        family=config["model_type"],
    )


def _read_mixtral(config: Config) -> GPTArchitecture:
    return dataclasses.replace(
        _read_llama(config),
        num_moe_experts=config["num_local_experts"],
        moe_router_topk=config["num_experts_per_tok"],
    )


def _read_qwen3_moe(config: Config) -> GPTArchitecture:
    """``num_experts`` became ``num_local_experts`` in transformers 5."""
    experts = config.get("num_experts") or config.get("num_local_experts") or 128
    return dataclasses.replace(
        _read_llama(config),
        num_moe_experts=experts,
        moe_router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_router_pre_softmax=not config["norm_topk_prob"],
    )


def _read_rope(config: Config) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or the two older keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling(factor=float(rope["factor"]), kind="linear")
    if kind == "llama3":
        return base, RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    raise CheckpointError(
        f"rope type {kind!r} in config.json is not supported; known: default, linear, llama3"
    )


def _write_llama(architecture: GPTArchitecture) -> Config:
    config = {key: getattr(architecture, field) for field, key in _LLAMA_KEYS.items()}
    config |= {"hidden_act": "silu", "rope_theta": architecture.rotary_base}
    config["rope_scaling"] = _write_rope_scaling(architecture.rope_scaling)
    return config


def _write_rope_scaling(scaling: RopeScaling | None) -> Config | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


def _write_biased_llama(architecture: GPTArchitecture) -> Config:
    bias = architecture.bias_linear
    return {**_write_llama(architecture), "attention_bias": bias, "mlp_bias": bias}


def _write_mistral(architecture: GPTArchitecture) -> Config:
    return {**_write_llama(architecture), "sliding_window": architecture.window_size}


def _write_qwen(architecture: GPTArchitecture) -> Config:
    return {**_write_llama(architecture), "use_sliding_window": False}


def _write_mixtral(architecture: GPTArchitecture) -> Config:
    return {
        **_write_mistral(architecture),
        "num_local_experts": architecture.num_moe_experts,
        "num_experts_per_tok": architecture.moe_router_topk,
    }


def _write_qwen3_moe(architecture: GPTArchitecture) -> Config:
    return {
        **_write_qwen(architecture),
        "num_experts": architecture.num_moe_experts,
        "num_experts_per_tok": architecture.moe_router_topk,
        "moe_intermediate_size": architecture.expert_ffn_hidden_size,
        "norm_topk_prob": not architecture.moe_router_pre_softmax,
    }


def _read_gpt2(config: Config) -> GPTArchitecture:
    fields: dict[str, Any] = {field: config.get(key) for field, key in _GPT2_KEYS.items()}
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    fields["ffn_hidden_size"] = fields["ffn_hidden_size"] or 4 * hidden
    activation = config["activation_function"]
    if activation not in _GPT2_ACTIVATIONS:
        raise CheckpointError(
            f"activation_function={activation!r} in config.json is not supported; "
            f"known: {', '.join(_GPT2_ACTIVATIONS)}"
        )
    return GPTArchitecture(
        **fields,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        activation=_GPT2_ACTIVATIONS[activation],
        normalization="layernorm",
        position_embedding="learned_absolute",
        bias_linear=True,
        family="gpt2",
    )


def _write_gpt2(architecture: GPTArchitecture) -> Config:
    config = {key: getattr(architecture, field) for field, key in _GPT2_KEYS.items()}
    names = {value: key for key, value in reversed(_GPT2_ACTIVATIONS.items())}
    config["activation_function"] = names.get(architecture.activation, architecture.activation)
    return {**config, "embd_pdrop": architecture.hidden_dropout}


_WINDOWED = ("mistral", "mixtral")
_NO_WINDOW = {"use_sliding_window": False, "hidden_act": "silu"}
# Other values that transformers takes for the same.
_SAME = (("hidden_act", "swish"), ("mlp_only_layers", None))
_FIXED_GPT2 = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_COMMON = {"initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False}
_LLAMA_DEFAULTS = {**_COMMON, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_QWEN_DEFAULTS = {**_COMMON, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768}
_FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        LLAMA_TABLE,
        _read_llama,
        _write_biased_llama,
        _LLAMA_DEFAULTS,
        {"hidden_act": "silu"},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        LLAMA_TABLE,
        _read_llama,
        _write_mistral,
        {**_COMMON, "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072}
        | {"num_key_value_heads": 8, "sliding_window": 4096},
        {"hidden_act": "silu"},
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA_TABLE,
        _read_llama,
        _write_qwen,
        {**_QWEN_DEFAULTS, "num_key_value_heads": 32},
        _NO_WINDOW,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA_TABLE,
        _read_llama,
        _write_qwen,
        {**_QWEN_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        {**_NO_WINDOW, "attention_bias": False},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        MIXTRAL_TABLE,
        _read_mixtral,
        _write_mixtral,
        {**_COMMON, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "rope_theta": 1e6}
        | {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        {"hidden_act": "silu", "router_jitter_noise": 0.0},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        QWEN3_MOE_TABLE,
        _read_qwen3_moe,
        _write_qwen3_moe,
        {**_QWEN_DEFAULTS, "num_key_value_heads": 4, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768, "norm_topk_prob": False},
        {**_NO_WINDOW, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        GPT2_TABLE,
        _read_gpt2,
        _write_gpt2,
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024}
        | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.02}
        | {"tie_word_embeddings": True},
        _FIXED_GPT2,
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}


def family_of(model_type: object) -> Family:
    """The row of a ``model_type``."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type={model_type!r} is not supported; supported families: "
            f"{', '.join(FAMILIES)} (SmolLM is a llama)"
        )
    return FAMILIES[model_type]


def architecture_from_hf(config: Mapping[str, Any]) -> GPTArchitecture:
    """Read an architecture off ``config.json``."""
    family = family_of(config.get("model_type"))
    for key, value in family.fixed.items():
        given = config.get(key, value)
        if given != value and (key, given) not in _SAME:
            raise CheckpointError(
                f"{key}={config[key]!r} in config.json is not supported for {family.model_type}; "
                f"supported: {value!r}"
            )
    try:
        return family.read({**family.defaults, **config})
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"config.json is incomplete or damaged: {error!r}") from error


def config_to_hf(architecture: GPTArchitecture) -> tuple[Family, Config]:
    """Family and ``config.json`` of an architecture; `CheckpointError` where none can express it.

    Without a recorded family the first that fits is taken.
    """
    family = family_of(architecture.family or _guess(architecture))
    config = family.write(architecture)
    config |= {"model_type": family.model_type, "architectures": [family.model_class]}
    lost = _differences(architecture, family.read(config))
    if lost:
        raise CheckpointError(
            f"a Hugging Face {family.model_type} cannot express {', '.join(lost)}; "
            f"supported families: {', '.join(FAMILIES)}"
        )
    return family, config


def _guess(architecture: GPTArchitecture) -> str:
    if architecture.position_embedding == "learned_absolute":
        return "gpt2"
    if architecture.num_moe_experts is not None:
        return "qwen3_moe" if architecture.qk_layernorm else "mixtral"
    if architecture.qk_layernorm:
        return "qwen3"
    if architecture.bias_qkv:
        return "qwen2"
    return "mistral" if architecture.window_size else "llama"


def _differences(wanted: GPTArchitecture, got: GPTArchitecture) -> list[str]:
    ignored = set(_NOT_CARRIED)
    if wanted.position_embedding != "rope":
        ignored |= {"rotary_base", "rotary_percent", "rope_scaling"}
    if wanted.num_moe_experts is not None:
        wanted, got = (
            dataclasses.replace(a, moe_ffn_hidden_size=a.expert_ffn_hidden_size)
            for a in (wanted, got)
        )
    else:
        ignored |= {"moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax"}
    return [
        f"{field.name}={getattr(wanted, field.name)!r}"
        for field in dataclasses.fields(wanted)
        if field.name not in ignored and getattr(wanted, field.name) != getattr(got, field.name)
    ]
