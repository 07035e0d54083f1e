"""Conversion between Hugging Face's ``config.json`` and `GPTArchitecture`, per model family."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.architecture import Activation, GPTArchitecture, RopeScaling
from aligner.checkpoint.hf.tensors import (
    GPT2_TABLE,
    LLAMA_TABLE,
    MIXTRAL_TABLE,
    QWEN3_MOE_TABLE,
    Table,
)
from aligner.errors import CheckpointError, raised_as

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
_MISTRAL_KEYS = {**_LLAMA_KEYS, "window_size": "sliding_window"}
_MIXTRAL_KEYS = {
    **_MISTRAL_KEYS,
    "num_moe_experts": "num_local_experts",
    "moe_router_topk": "num_experts_per_tok",
}
_QWEN3_MOE_KEYS = {
    **_LLAMA_KEYS,
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_pre_softmax": "norm_topk_prob",  # negated
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
# rope_type → its settings, under the names of the fields of `RopeScaling`.
_ROPE_SETTINGS = {
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}
# Settings that config.json lacks, or that matter only in training.
_NOT_CARRIED = {"make_vocab_size_divisible_by", "family", "hidden_dropout", "attention_dropout"}
# Other values that transformers treats as equal to the fixed value.
_SAME = (("hidden_act", "swish"), ("mlp_only_layers", None))


@dataclass(frozen=True)
class Family:
    """Family of models with one ``model_type``.

    Args:
        model_type: name of the family in ``config.json``.
        model_class: class of transformers.
        table: names and layouts of the tensors.
        keys: architecture field → key of ``config.json``.
        defaults: transformers' values for keys that are absent in ``config.json``.
        fixed: keys with their only supported value. An absent key counts as this value.
        implied: architecture fields that are equal for all models of the family.
        written: keys that are always written to ``config.json`` with this value.
    """

    model_type: str
    model_class: str
    table: Table
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    implied: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _is_gpt2(self) -> bool:
        return self.model_type == "gpt2"

    def read(self, config: Config) -> GPTArchitecture:
        """Return the architecture of a ``config.json`` that includes the defaults."""
        fields: dict[str, Any] = {name: config.get(key) for name, key in self.keys.items()}
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        fields["num_query_groups"] = fields.get("num_query_groups") or heads
        fields["kv_channels"] = fields.get("kv_channels") or hidden // heads
        if self._is_gpt2:
            fields["ffn_hidden_size"] = fields["ffn_hidden_size"] or 4 * hidden
        kind = _read_gpt2(config) if self._is_gpt2 else _read_llama(config)
        if "moe_router_pre_softmax" in fields:
            fields["moe_router_pre_softmax"] = not fields["moe_router_pre_softmax"]
            # ``num_experts`` became ``num_local_experts`` in transformers 5.
            experts = fields["num_moe_experts"] or config.get("num_local_experts") or 128
            fields["num_moe_experts"] = experts
        return GPTArchitecture(**{**fields, **kind, **self.implied, "family": self.model_type})

    def write(self, architecture: GPTArchitecture) -> Config:
        """Return the ``config.json`` of an architecture."""
        config = {key: getattr(architecture, name) for name, key in self.keys.items()}
        if self._is_gpt2:
            activations = {value: key for key, value in reversed(_GPT2_ACTIVATIONS.items())}
            activation = activations.get(architecture.activation, architecture.activation)
            config |= {"activation_function": activation, "embd_pdrop": architecture.hidden_dropout}
        else:
            scaling, rope = architecture.rope_scaling, None
            if scaling is not None:
                settings = {name: getattr(scaling, name) for name in _ROPE_SETTINGS[scaling.kind]}
                rope = {"rope_type": scaling.kind, **settings}
            config |= {"hidden_act": "silu", "rope_theta": architecture.rotary_base}
            config["rope_scaling"] = rope
        # Keys with another form or meaning than the architecture's fields.
        if "moe_router_pre_softmax" in self.keys:
            config["moe_intermediate_size"] = architecture.expert_ffn_hidden_size
            config["norm_topk_prob"] = not architecture.moe_router_pre_softmax
        if self.model_type == "llama":
            config |= dict.fromkeys(("attention_bias", "mlp_bias"), architecture.bias_linear)
        names = {"model_type": self.model_type, "architectures": [self.model_class]}
        return {**config, **self.written, **names}


def _read_llama(config: Config) -> dict[str, Any]:
    """Return the fields that depend on several keys of ``config.json``.

    The rotary base and scaling are in ``rope_parameters`` (transformers 5) or in two older keys.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # Scaling of the rotary frequencies.
    scaling = None
    if kind in _ROPE_SETTINGS:
        settings: dict[str, Any] = {name: float(rope[name]) for name in _ROPE_SETTINGS[kind]}
        if kind == "llama3":
            positions = int(rope["original_max_position_embeddings"])
            settings["original_max_position_embeddings"] = positions
        scaling = RopeScaling(**{**settings, "kind": kind})
    elif kind != "default":
        raise CheckpointError(
            f"rope type {kind!r} in config.json is not supported. Supported: default, linear, "
            "llama3"
        )
    # One flag covers the biases of attention and MLP.
    biases = {bool(config.get("attention_bias")), bool(config.get("mlp_bias"))}
    if len(biases) > 1:
        raise CheckpointError(
            "attention_bias and mlp_bias differ in config.json. Set both or neither"
        )
    return {
        "rotary_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "rope_scaling": scaling,
        "bias_linear": biases.pop(),
    }


def _read_gpt2(config: Config) -> dict[str, Any]:
    activation = config["activation_function"]
    if activation not in _GPT2_ACTIVATIONS:
        raise CheckpointError(
            f"activation_function={activation!r} in config.json is not supported. "
            f"Supported: {', '.join(_GPT2_ACTIVATIONS)}"
        )
    layers = {"normalization": "layernorm", "position_embedding": "learned_absolute"}
    return {**layers, "activation": _GPT2_ACTIVATIONS[activation], "bias_linear": True}


_SILU = {"hidden_act": "silu"}
_NO_WINDOW = {"use_sliding_window": False}
_COMMON = {"initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False}
_LLAMA_DEFAULTS = {**_COMMON, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    **{"max_position_embeddings": 131_072, "num_key_value_heads": 8},
}
_QWEN_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    **{"max_position_embeddings": 32_768, "num_key_value_heads": 32},
}
_QWEN3_FIXED = {**_NO_WINDOW, **_SILU, "attention_bias": False}
_FAMILIES = (
    Family("llama", "LlamaForCausalLM", LLAMA_TABLE, _LLAMA_KEYS, _LLAMA_DEFAULTS, _SILU),
    Family(
        "mistral",
        "MistralForCausalLM",
        LLAMA_TABLE,
        _MISTRAL_KEYS,
        {**_MISTRAL_DEFAULTS, "sliding_window": 4096},
        _SILU,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA_TABLE,
        _LLAMA_KEYS,
        _QWEN_DEFAULTS,
        {**_NO_WINDOW, **_SILU},
        {"bias_qkv": True},
        _NO_WINDOW,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA_TABLE,
        _LLAMA_KEYS,
        {**_QWEN_DEFAULTS, "head_dim": 128},
        _QWEN3_FIXED,
        {"qk_layernorm": True},
        _NO_WINDOW,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        MIXTRAL_TABLE,
        _MIXTRAL_KEYS,
        {**_MISTRAL_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        {**_SILU, "router_jitter_noise": 0.0},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        QWEN3_MOE_TABLE,
        _QWEN3_MOE_KEYS,
        {**_QWEN_DEFAULTS, "num_key_value_heads": 4, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768, "norm_topk_prob": False},
        {**_QWEN3_FIXED, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"qk_layernorm": True},
        _NO_WINDOW,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        GPT2_TABLE,
        _GPT2_KEYS,
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024}
        | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.02}
        | {"tie_word_embeddings": True},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}


def family_of(model_type: object) -> Family:
    """Return the family of a ``model_type``, or raise `CheckpointError`."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type={model_type!r} is not supported. Supported families: "
            f"{', '.join(FAMILIES)} (SmolLM is a llama)"
        )
    return FAMILIES[model_type]


def architecture_from_hf(config: Mapping[str, Any]) -> GPTArchitecture:
    """Return the architecture that a ``config.json`` describes."""
    family = family_of(config.get("model_type"))
    for key, value in family.fixed.items():
        setting = config.get(key, value)
        if setting != value and (key, setting) not in _SAME:
            raise CheckpointError(
                f"{key}={setting!r} in config.json is not supported for {family.model_type}. "
                f"Supported: {value!r}"
            )
    damage = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
    with raised_as(CheckpointError, "config.json is incomplete or damaged", *damage):
        return family.read({**family.defaults, **config})


def config_to_hf(architecture: GPTArchitecture) -> tuple[Family, Config]:
    """Return the family and ``config.json`` of an architecture.

    Without a recorded family, the architecture's features determine it. Raises `CheckpointError`
    if the family cannot express the architecture.
    """
    family = family_of(architecture.family or _guess(architecture))
    config = family.write(architecture)
    lost = _differences(architecture, family.read(config))
    if lost:
        raise CheckpointError(
            f"a Hugging Face {family.model_type} cannot express {', '.join(lost)}. "
            f"Supported families: {', '.join(FAMILIES)}"
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
