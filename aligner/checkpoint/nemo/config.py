"""Conversion between NeMo's ``model_config.yaml`` and `GPTArchitecture`."""

import dataclasses
import re
from typing import Any, get_args

import yaml

from aligner.architecture import (
    Activation,
    GPTArchitecture,
    Normalization,
    PositionEmbedding,
    RopeScaling,
    layer_flags,
)
from aligner.errors import CheckpointError, raised_as

Config = dict[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "openai-gelu": "gelu_tanh",
    "geglu": "geglu",
    "fast-geglu": "geglu",
    "swiglu": "swiglu",
    "clamped_swiglu": "clamped_swiglu",
    "fast-swiglu": "swiglu",
    "squared-relu": "squared_relu",
    "relu": "relu",
    "silu": "silu",
}
_NORMALIZATIONS: dict[str, Normalization] = {
    "layernorm": "layernorm",
    "low_precision_layernorm": "layernorm",
    "layernorm1p": "layernorm1p",
    "rmsnorm": "rmsnorm",
}
_POSITION_EMBEDDINGS = {name: name for name in get_args(PositionEmbedding)}
_WRITTEN_ACTIVATIONS: dict[Activation, str] = {
    "gelu_tanh": "gelu",  # together with openai_gelu
    "squared_relu": "squared-relu",
    "swiglu": "fast-swiglu",
    "geglu": "fast-geglu",
    "geglu_tanh": "geglu",  # together with bias_activation_fusion
}
# Settings of experts that megatron-core has, but `GPTArchitecture` lacks → value without effect.
_PLAIN_EXPERTS: Config = {
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None,
    "moe_expert_capacity_factor": None,
}
# Field of `GPTArchitecture` → NeMo's key, and NeMo's value if the key is absent.
_KEYS: dict[str, tuple[str, bool | int | float]] = {
    "layernorm_epsilon": ("layernorm_epsilon", 1e-5),
    "rotary_base": ("rotary_base", 10_000.0),
    "rotary_percent": ("rotary_percentage", 1.0),
    "tie_embeddings": ("share_embeddings_and_output_weights", True),
    "bias_linear": ("bias", True),
    "qk_layernorm": ("qk_layernorm", False),
    "attention_dropout": ("attention_dropout", 0.1),
    "hidden_dropout": ("hidden_dropout", 0.1),
    "init_std": ("init_method_std", 0.02),
    "make_vocab_size_divisible_by": ("make_vocab_size_divisible_by", 128),
}
# Fields of `GPTArchitecture` without a key in NeMo, written if they differ from the default.
_OWN_KEYS = (
    *("qk_norm_over_heads", "branch_norms", "embedding_multiplier", "residual_multiplier"),
    *("logits_cap", "attention_cap", "logits_divisor", "window_rotary_base"),
    *("layers_without_experts", "moe_router_sigmoid"),
    *("q_lora_rank", "kv_lora_rank", "value_channels", "attention_sinks", "activation_clamp"),
    *("moe_router_groups", "moe_router_group_topk", "moe_router_normalizes", "moe_router_scale"),
)
_INTERPOLATION = re.compile(r"^\$\{\.*(?:model\.)?(\w+)\}$")
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size"),
    *("num_attention_heads", "num_query_groups", "kv_channels"),
)
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


def parse_config(data: bytes) -> Config:
    """Parse ``model_config.yaml`` and resolve references such as ``${.encoder_seq_length}``.

    Raises `CheckpointError` if it does not describe a GPT.
    """
    damage = (yaml.YAMLError, UnicodeDecodeError, RecursionError)
    with raised_as(CheckpointError, "model_config.yaml cannot be parsed", *damage):
        config = yaml.safe_load(data)
    config = config if isinstance(config, dict) else {}
    if isinstance(config.get("model"), dict):
        config = config["model"]
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise CheckpointError(
            f"model_config.yaml lacks {', '.join(missing)}, which every GPT model has. "
            "Give a .nemo of a GPT model"
        )
    return {key: _resolved(config, value) for key, value in config.items()}


def _resolved(config: Config, value: Any) -> Any:
    for _ in range(8):  # maximum length of a chain of references, which may be a cycle
        match = _INTERPOLATION.match(value) if isinstance(value, str) else None
        if match is None or match[1] not in config:
            break
        value = config[match[1]]
    return value


def architecture_from_config(config: Config, vocab_size: int | None) -> GPTArchitecture:
    """Return the architecture for NeMo's keys. An absent or null key has NeMo's default.

    ``vocab_size``: number of the tokenizer's tokens, used if ``config`` lacks ``vocab_size``. Only
    this library writes that key. Raises `CheckpointError` for missing and unsupported values.
    """
    vocab_size = config.get("vocab_size") or vocab_size
    if vocab_size is None:
        raise CheckpointError(
            "the vocabulary size is unknown: model_config.yaml lacks vocab_size and the archive "
            "contains no tokenizer. Add vocab_size to model_config.yaml"
        )

    def get(key: str, default: Any) -> Any:
        value = config.get(key)
        return default if value is None else value

    # Refuse variants of experts that this library does not compute.
    for key, plain in _PLAIN_EXPERTS.items():
        if config.get("num_moe_experts") and config.get(key) not in (None, plain):
            raise CheckpointError(
                f"{key}={config[key]!r} in model_config.yaml is not supported. Supported: {plain!r}"
            )
    # Fields that depend on several keys are read by functions below.
    text = "model_config.yaml contains a value of a wrong type"
    with raised_as(CheckpointError, text, TypeError, ValueError, ArithmeticError):
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        scale = hidden**0.5 if config.get("apply_embedding_scaling") else 1.0  # NeMo's Gemma
        direct: Config = {
            name: type(default)(get(key, default)) for name, (key, default) in _KEYS.items()
        }
        own = {name: config[name] for name in _OWN_KEYS if config.get(name) is not None}
        own = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
        return GPTArchitecture(
            num_layers=int(config["num_layers"]),
            hidden_size=hidden,
            ffn_hidden_size=int(get("ffn_hidden_size", 4 * hidden)),
            num_attention_heads=heads,
            num_query_groups=int(get("num_query_groups", heads)),
            kv_channels=int(get("kv_channels", hidden // max(heads, 1))),
            vocab_size=vocab_size,
            max_position_embeddings=_positions(config),
            activation=_activation(config),
            normalization=_normalization(config),
            position_embedding=_choice(
                config, "position_embedding_type", "learned_absolute", _POSITION_EMBEDDINGS
            ),
            rope_scaling=_rope_scaling(config),
            layers_without_rope=_skipped(config, "no_rope_freq"),
            bias_qkv=bool(get("qkv_bias", False)) and not get("bias", True),
            attention_scale=config.get("softmax_scale"),
            # NeMo's ``[left, 0]`` excludes the current token, this library includes it.
            window_size=int(config["window_size"][0]) + 1 if config.get("window_size") else None,
            num_moe_experts=config.get("num_moe_experts"),
            moe_router_topk=int(get("moe_router_topk", 2)),
            moe_ffn_hidden_size=config.get("moe_ffn_hidden_size"),
            moe_router_pre_softmax=bool(get("moe_router_pre_softmax", False)),
            moe_shared_expert_size=config.get("moe_shared_expert_intermediate_size"),
            moe_shared_expert_gate=bool(get("moe_shared_expert_gate", False)),
            layers_without_window=_skipped(config, "window_attn_skip_freq", invert=True),
            family=config.get("hf_model_type"),
            **{"embedding_multiplier": scale, **direct, **own},
        )


def _choice(config: Config, key: str, default: str, choices: dict[str, Any]) -> Any:
    setting = default if config.get(key) is None else config[key]
    value = str(setting).lower()
    if value not in choices:
        kind = "" if isinstance(setting, str) else f", a {type(setting).__name__},"
        raise CheckpointError(
            f"{key}={value!r}{kind} in model_config.yaml is not supported. Supported: "
            f"{', '.join(choices)}"
        )
    return choices[value]


def _activation(config: Config) -> Activation:
    """Return the activation. NeMo's kernels that fuse bias and gelu compute its tanh form."""
    activation: Activation = _choice(config, "activation", "gelu", _ACTIVATIONS)
    fused = bool(config.get("bias_activation_fusion"))
    if activation == "gelu" and (fused or config.get("openai_gelu")):
        return "gelu_tanh"
    return "geglu_tanh" if activation == "geglu" and fused else activation


def _normalization(config: Config) -> Normalization:
    norm: Normalization = _choice(config, "normalization", "layernorm", _NORMALIZATIONS)
    if norm in ("layernorm", "rmsnorm") and config.get("layernorm_zero_centered_gamma"):
        return "layernorm1p" if norm == "layernorm" else "rmsnorm1p"
    return norm


def _positions(config: Config) -> int:
    keys = ["max_position_embeddings", "encoder_seq_length"]
    learned = config.get("position_embedding_type") in (None, "learned_absolute")
    if learned and config.get("mcore_gpt"):
        keys.reverse()  # the learned position embedding has ``encoder_seq_length`` rows
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    raise CheckpointError("model_config.yaml lacks max_position_embeddings")


def _rope_scaling(config: Config) -> RopeScaling | None:
    if config.get("rope_scaling"):
        text = "rope_scaling in model_config.yaml is not a mapping of its settings"
        with raised_as(CheckpointError, text, TypeError):
            settings: Config = {**config["rope_scaling"]}
            lists = {name: tuple(v) for name, v in settings.items() if isinstance(v, list)}
            return RopeScaling(**settings | lists)
    if config.get("scale_positional_embedding"):  # NeMo's switch for Llama 3.1's constants
        return RopeScaling(factor=float(config.get("scale_factor") or 8.0))
    if config.get("seq_len_interpolation_factor"):
        return RopeScaling(factor=float(config["seq_len_interpolation_factor"]), kind="linear")
    return None


def config_from_architecture(architecture: GPTArchitecture) -> Config:
    """Return the content of ``model_config.yaml`` for an architecture."""
    is_zero_centred = architecture.normalization == "rmsnorm1p"
    # Keys that are always written. The optional keys follow.
    config: Config = {
        "mcore_gpt": True,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "encoder_seq_length": architecture.max_position_embeddings,
        "max_position_embeddings": architecture.max_position_embeddings,
        **{name: getattr(architecture, name) for name in _SIZES},
        **{key: getattr(architecture, name) for name, (key, _) in _KEYS.items()},
        "use_scaled_init_method": True,
        "ffn_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        "normalization": "rmsnorm" if is_zero_centred else architecture.normalization,
        "vocab_size": architecture.vocab_size,
        "pre_process": True,
        "post_process": True,
        "qkv_bias": architecture.bias_qkv,
        "activation": _WRITTEN_ACTIVATIONS.get(architecture.activation, architecture.activation),
        "openai_gelu": architecture.activation == "gelu_tanh",
        "bias_activation_fusion": architecture.activation == "geglu_tanh",
        "transformer_block_type": "pre_ln",
        "position_embedding_type": architecture.position_embedding,
        "sequence_parallel": False,
        "precision": 32,
        "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model."
        "MegatronGPTModel",
    }
    # Keys that are written only for models that use them.
    optional = {
        "hf_model_type": architecture.family,
        "layernorm_zero_centered_gamma": is_zero_centred or None,
        "softmax_scale": architecture.attention_scale,
        "apply_embedding_scaling": architecture.embedding_multiplier
        == architecture.hidden_size**0.5
        or None,
        "no_rope_freq": layer_flags(architecture.layers_without_rope, architecture),
        "window_attn_skip_freq": layer_flags(
            architecture.layers_without_window, architecture, invert=True
        ),
        "window_size": [architecture.window_size - 1, 0] if architecture.window_size else None,
        "num_moe_experts": architecture.num_moe_experts,
        "moe_router_topk": architecture.moe_router_topk if architecture.num_moe_experts else None,
        "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
        "moe_router_pre_softmax": architecture.moe_router_pre_softmax or None,
        "moe_shared_expert_intermediate_size": architecture.moe_shared_expert_size,
        "moe_shared_expert_gate": architecture.moe_shared_expert_gate or None,
    }
    default = {field.name: field.default for field in dataclasses.fields(GPTArchitecture)}
    others = {name: getattr(architecture, name) for name in _OWN_KEYS}
    others = {name: value for name, value in others.items() if value != default[name]}
    optional |= {n: list(v) if isinstance(v, tuple) else v for n, v in others.items()}
    config |= {key: value for key, value in optional.items() if value is not None}
    return config | _written_rope_scaling(architecture.rope_scaling)


def _skipped(config: Config, key: str, *, invert: bool = False) -> tuple[int, ...]:
    """Return the indices of the layers that ``config[key]`` selects, by flags or by an integer n.

    Flags, one per layer, select those with 1, or with 0 if ``invert``. n selects every n-th layer.
    """
    flags, layers = config.get(key) or [], range(int(config["num_layers"]))
    if isinstance(flags, int):
        return tuple(n for n in layers if (n + 1) % flags == 0)
    if flags and len(flags) != len(layers):
        raise CheckpointError(
            f"{key} in model_config.yaml has {len(flags)} values, but the model has {len(layers)} "
            "layers. Give one value per layer"
        )
    return tuple(n for n, flag in enumerate(flags) if bool(flag) is not invert)


def _written_rope_scaling(scaling: RopeScaling | None) -> Config:
    if scaling is None:
        return {}
    if scaling.kind == "linear":
        return {"seq_len_interpolation_factor": scaling.factor}
    settings = {
        name: value
        for name, value in vars(scaling).items()
        if value not in (None, ()) and value is not True
    }
    if scaling.kind != "llama3":
        return {"rope_scaling": settings}
    return {
        "scale_positional_embedding": True,
        "scale_factor": scaling.factor,
        "rope_scaling": settings,
    }


def dump_config(config: Config) -> bytes:
    """Return ``config`` as YAML. The order of its keys is unchanged."""
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode()
