"""Conversion between Hugging Face's ``config.json`` and `GPTArchitecture`, per model family."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.architecture import Activation, GPTArchitecture, RopeScaling
from aligner.checkpoint.hf.tensors import (
    ALL_HEADS_NORM,
    FUSED_GATE_UP,
    FUSED_QKV,
    GPT2_TABLE,
    INTERLEAVED_ROPE,
    LLAMA_TABLE,
    MIXTRAL_TABLE,
    QWEN2_MOE_TABLE,
    QWEN3_MOE_TABLE,
    STARCODER2_MLP,
    UNGATED_MLP,
    Table,
    norms_after,
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
_ORIGINAL = "original_max_position_embeddings"
_ROPE_SETTINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", "attention_factor", _ORIGINAL),
}
_OPTIONAL_ROPE_SETTINGS = {"attention_factor", "beta_fast", "beta_slow"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PARTIAL, _LAYERS = "partial_rotary_factor", "num_hidden_layers"
# Settings that config.json lacks, or that matter only in training.
_NOT_CARRIED = {"make_vocab_size_divisible_by", "family", "hidden_dropout", "attention_dropout"}
# Key, fixed value (or family), and another value that transformers treats as equal to it.
_SAME: tuple[tuple[str, Any, Any], ...] = (
    *(("hidden_act", "silu", "swish"), ("hidden_act", "gemma", "gelu")),
    *(("mlp_only_layers", [], None), ("use_bidirectional_attention", None, False)),
)


@dataclass(frozen=True)
class Family:
    """Family of models with one ``model_type``.

    Args:
        model_type: name of the family in ``config.json``.
        model_class: class of transformers.
        table: names and layouts of the tensors.
        keys: architecture field → key of ``config.json``.
        defaults: transformers' values for keys that are absent in ``config.json``.
        fixed: keys with their only supported value, which is written to ``config.json``. An absent
            key counts as this value.
        implied: architecture fields that are equal for all models of the family.
        equal: keys whose value must be the value of another key.
        rotary_percent: rotated share of a head if ``config.json`` does not give it. None: all, and
            ``config.json`` may not give another share.
        scales_embeddings: true if embeddings are multiplied by the root of their width.
        window_pattern: default of n, where all layers but every n-th have a window. None: all
            layers are alike.
        window_rotary_base: default of the rotary base of layers with a window.
    """

    model_type: str
    model_class: str
    table: Table
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    implied: Mapping[str, Any] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    rotary_percent: float | None = None
    scales_embeddings: bool = False
    window_pattern: int | None = None
    window_rotary_base: float | None = None

    def variant(self, model_type: str, model_class: str, **changes: Any) -> "Family":
        """Return a family with other names and ``changes``. Mappings are extended."""
        extended: dict[str, Any] = {
            name: {**getattr(self, name), **value} if isinstance(value, Mapping) else value
            for name, value in changes.items()
        }
        return dataclasses.replace(self, model_type=model_type, model_class=model_class, **extended)

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
        fields |= _read_gpt2(config) if self._is_gpt2 else self._read_rope(config)
        for key, other in self.equal.items():
            if bool(config.get(key)) != bool(config.get(other)):
                raise CheckpointError(
                    f"{other} and {key} differ in config.json. Set both or neither"
                )
        if "moe_router_pre_softmax" in fields:
            fields["moe_router_pre_softmax"] = not fields["moe_router_pre_softmax"]
            # ``num_experts`` became ``num_local_experts`` in transformers 5.
            experts = fields["num_moe_experts"] or config.get("num_local_experts") or 128
            fields["num_moe_experts"] = experts
        if "layers_without_rope" in fields:
            fields["layers_without_rope"] = _layers_without_rope(config)
        if self.window_pattern is not None:
            fields |= self._read_windows(config)
        if "attention_scale" in fields and self.model_type.startswith("gemma"):
            fields["attention_scale"] = fields["attention_scale"] ** -0.5
        if self.scales_embeddings:
            fields["embedding_multiplier"] = math.sqrt(hidden)
        return GPTArchitecture(**{**fields, **self.implied, "family": self.model_type})

    def write(self, architecture: GPTArchitecture) -> Config:
        """Return the ``config.json`` of an architecture."""
        # Some families have an id in their defaults, which a small vocabulary lacks.
        config: Config = {"pad_token_id": None, **self.fixed}
        config |= {key: getattr(architecture, name) for name, key in self.keys.items()}
        if self._is_gpt2:
            activations = {value: key for key, value in reversed(_GPT2_ACTIVATIONS.items())}
            activation = activations.get(architecture.activation, architecture.activation)
            config |= {"activation_function": activation, "embd_pdrop": architecture.hidden_dropout}
        else:
            config |= self._written_rope(architecture)
        # Keys with another form or meaning than the architecture's fields.
        if "moe_router_pre_softmax" in self.keys:
            config["moe_intermediate_size"] = architecture.expert_ffn_hidden_size
            config["norm_topk_prob"] = not architecture.moe_router_pre_softmax
        if "layers_without_rope" in self.keys:
            skipped = architecture.layers_without_rope
            config["no_rope_layers"] = [int(n not in skipped) for n in range(config[_LAYERS])]
        config |= {key: config[other] for key, other in self.equal.items()}
        if self.window_pattern is not None:
            config |= self._written_windows(architecture, config)
        if "attention_scale" in self.keys and self.model_type.startswith("gemma"):
            config["query_pre_attn_scalar"] = round((architecture.attention_scale or 1.0) ** -2)
        names = {"model_type": self.model_type, "architectures": [self.model_class]}
        return {**config, **names}

    def _read_windows(self, config: Config) -> dict[str, Any]:
        """Return the layers without a window, and the rotary base of the others."""
        numbers, pattern = range(config[_LAYERS]), config.get("sliding_window_pattern")
        full = {n for n in numbers if (n + 1) % (pattern or self.window_pattern or 1) == 0}
        if config.get("layer_types"):
            full = {n for n in numbers if config["layer_types"][n] == _FULL}
        if len(full) == len(numbers):
            return {"window_size": None}
        rope = (config.get("rope_parameters") or {}).get(_SLIDING) or {}
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"rope type {rope['rope_type']!r} of {_SLIDING} layers in config.json is not "
                "supported. Supported: default"
            )
        base = rope.get("rope_theta") or config.get("rope_local_base_freq")
        read = self._read_rope(config)
        base = float(base or self.window_rotary_base or read["rotary_base"])
        is_same = base == read["rotary_base"] and read["rope_scaling"] is None
        windows = {"layers_without_window": tuple(sorted(full))}
        return {**windows, "window_rotary_base": None if is_same else base}

    def _written_windows(self, architecture: GPTArchitecture, config: Config) -> Config:
        """Return the kinds of the layers and their rotations."""
        numbers, windowed = range(architecture.num_layers), architecture.window_size is not None
        full = architecture.layers_without_window if windowed else numbers
        base, scaling = config["rope_theta"], config["rope_scaling"] or {"rope_type": "default"}
        local = architecture.window_rotary_base or base
        return {
            "layer_types": [_FULL if n in full else _SLIDING for n in numbers],
            "rope_local_base_freq": local,
            "rope_parameters": {
                _FULL: {**scaling, "rope_theta": base},
                _SLIDING: {"rope_type": "default", "rope_theta": local},
            },
        }

    def _read_rope(self, config: Config) -> dict[str, Any]:
        """Return base, share and scaling of the rotation, and the longest sequence.

        They are in ``rope_parameters`` (transformers 5) or in older keys.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope = rope.get(_FULL) or rope
        share = rope.get(_PARTIAL, config.get(_PARTIAL))
        if self.rotary_percent is None and share not in (None, 1.0):
            raise CheckpointError(
                f"{_PARTIAL}={share!r} in config.json is not supported for {self.model_type}. "
                "Supported: 1.0"
            )
        scaling = _read_rope_scaling(config, rope)
        positions = config["max_position_embeddings"]
        if scaling is not None and scaling.kind == "longrope":
            positions = min(positions, scaling.original_max_position_embeddings)
        return {
            "rotary_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            "rotary_percent": float((self.rotary_percent or 1.0) if share is None else share),
            "rope_scaling": scaling,
            "max_position_embeddings": positions,
        }

    def _written_rope(self, architecture: GPTArchitecture) -> Config:
        """Return the keys that `_read_rope` reads, in the older form that all versions read."""
        config: Config = {"rope_theta": architecture.rotary_base, "rope_scaling": None}
        scaling = architecture.rope_scaling
        if scaling is not None:
            settings = {name: getattr(scaling, name) for name in _ROPE_SETTINGS[scaling.kind]}
            config["rope_scaling"] = {"rope_type": scaling.kind} | {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in settings.items()
                if value is not None
            }
            if scaling.kind == "longrope":
                original = scaling.original_max_position_embeddings
                config |= {_ORIGINAL: original}
                config["max_position_embeddings"] = round(original * scaling.factor)
        if self.rotary_percent is not None:
            config[_PARTIAL] = architecture.rotary_percent
        return config


def _read_rope_scaling(config: Config, rope: Config) -> RopeScaling | None:
    """Return the scaling of the rotary frequencies."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # Early configurations of Phi-3 have other names for longrope.
    kind = "longrope" if "short_factor" in rope else kind
    if kind == "default":
        return None
    if kind not in _ROPE_SETTINGS:
        raise CheckpointError(
            f"rope type {kind!r} in config.json is not supported. Supported: default, "
            f"{', '.join(_ROPE_SETTINGS)}"
        )
    positions, values = config["max_position_embeddings"], dict(rope)
    if kind != "linear":
        values[_ORIGINAL] = int(config.get(_ORIGINAL) or rope.get(_ORIGINAL) or positions)
    # Settings that transformers derives from others.
    scales = [float(rope.get(name) or 0.0) for name in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and rope.get("truncate") is False:
        raise CheckpointError("truncate=false of rope type 'yarn' in config.json is not supported")
    if kind == "yarn" and all(scales) and rope.get("attention_factor") is None:
        upper, lower = (1.0 + 0.1 * scale * math.log(rope["factor"]) for scale in scales)
        values["attention_factor"] = upper / lower
    if kind == "longrope":
        values["factor"] = positions / values[_ORIGINAL]
        if rope.get("factor") and rope.get("attention_factor") is None:
            original = values[_ORIGINAL]
            given = RopeScaling(rope["factor"], 1.0, 4.0, original, "longrope")
            values["attention_factor"] = given.concentration
    # An absent setting has its default, if it has one.
    settings: dict[str, Any] = {"kind": kind, "factor": float(values["factor"])}
    for name in _ROPE_SETTINGS[kind]:
        if name in _OPTIONAL_ROPE_SETTINGS and values.get(name) is None:
            continue
        value = values[name]
        if isinstance(value, list | tuple):
            settings[name] = tuple(map(float, value))
        else:
            settings[name] = value if name == _ORIGINAL else float(value)
    return RopeScaling(**settings)


def _layers_without_rope(config: Config) -> tuple[int, ...]:
    """Return the layers of SmolLM 3 without rotation: given, or every fourth one."""
    count, interval = config[_LAYERS], config.get("no_rope_layer_interval") or 4
    rotated = config["no_rope_layers"] or [(n + 1) % interval for n in range(count)]
    return tuple(n for n in range(count) if not rotated[n])


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
_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    QWEN3_MOE_TABLE,
    _QWEN3_MOE_KEYS,
    {**_QWEN_DEFAULTS, "num_key_value_heads": 4, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768, "norm_topk_prob": False},
    {**_QWEN3_FIXED, "decoder_sparse_step": 1, "mlp_only_layers": []},
    {"qk_layernorm": True},
)
_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LLAMA_TABLE,
    {**_LLAMA_KEYS, "bias_linear": "attention_bias"},
    {**_LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
    _SILU,
    equal={"mlp_bias": "attention_bias"},
)
# Families that differ from Llama by names, activation, norms or biases.
_PLAIN = dataclasses.replace(_LLAMA, keys=_LLAMA_KEYS, equal={})
_BIAS_QKV = {"bias_qkv": "attention_bias"}
_SQUARED_RELU: dict[str, Any] = {
    "table": UNGATED_MLP,
    "fixed": {"hidden_act": "relu2"},
    "implied": {"activation": "squared_relu"},
}
_GLM = _PLAIN.variant(
    "glm",
    "GlmForCausalLM",
    table={**INTERLEAVED_ROPE, **FUSED_GATE_UP},
    keys=_BIAS_QKV,
    defaults={"attention_bias": True, "rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2}
    | {"head_dim": 128, "max_position_embeddings": 131_072},
    rotary_percent=0.5,
)
_LLAMA_LIKE = (
    _LLAMA.variant(
        "nemotron",
        "NemotronForCausalLM",
        **_SQUARED_RELU
        | {"implied": {"activation": "squared_relu", "normalization": "layernorm1p"}},
        keys={"layernorm_epsilon": "norm_eps"},
        defaults={"norm_eps": 1e-5, "initializer_range": 0.0134, "max_position_embeddings": 4096},
        rotary_percent=0.5,
    ),
    _PLAIN.variant(
        "starcoder2",
        "Starcoder2ForCausalLM",
        table=STARCODER2_MLP,
        keys={"bias_linear": "use_bias", "layernorm_epsilon": "norm_epsilon"}
        | {"window_size": "sliding_window", "hidden_dropout": "residual_dropout"},
        defaults={"use_bias": True, "norm_epsilon": 1e-5, "initializer_range": 0.018042}
        | {"num_key_value_heads": 2, "max_position_embeddings": 4096, "residual_dropout": 0.0}
        | {"tie_word_embeddings": True},
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        implied={"activation": "gelu_tanh", "normalization": "layernorm"},
    ),
    _PLAIN.variant(
        "phi3",
        "Phi3ForCausalLM",
        table={**FUSED_QKV, **FUSED_GATE_UP},
        keys={"window_size": "sliding_window", "hidden_dropout": "resid_pdrop"},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "resid_pdrop": 0.0}
        | {_ORIGINAL: 4096},
        rotary_percent=1.0,
    ),
    _PLAIN.variant(
        "stablelm",
        "StableLmForCausalLM",
        keys={"bias_qkv": "use_qkv_bias", "layernorm_epsilon": "layer_norm_eps"},
        defaults={"layer_norm_eps": 1e-5, "use_qkv_bias": False, "num_key_value_heads": 32}
        | {"max_position_embeddings": 4096},
        fixed={"use_parallel_residual": False, "qk_layernorm": False, "hidden_dropout": 0.0},
        implied={"normalization": "layernorm"},
        rotary_percent=0.25,
    ),
    _PLAIN.variant(
        "seed_oss",
        "SeedOssForCausalLM",
        keys={**_BIAS_QKV, "hidden_dropout": "residual_dropout"},
        defaults={"attention_bias": True, "attention_dropout": 0.1, "residual_dropout": 0.1}
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288},
        fixed={"attention_out_bias": False, "mlp_bias": False},
    ),
    _LLAMA.variant(
        "arcee",
        "ArceeForCausalLM",
        **_SQUARED_RELU,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    _LLAMA.variant(
        "smollm3",
        "SmolLM3ForCausalLM",
        keys={"layers_without_rope": "no_rope_layers"},
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2e6}
        | {"max_position_embeddings": 32_768, "no_rope_layers": None},
        fixed=_NO_WINDOW,
    ),
    _GLM,
    _PLAIN.variant(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        table=INTERLEAVED_ROPE,
        keys={"bias_linear": "use_bias"},
        defaults={"use_bias": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5}
        | {"max_position_embeddings": 131_072},
    ),
    _PLAIN.variant(
        "helium",
        "HeliumForCausalLM",
        table=INTERLEAVED_ROPE,
        keys=_BIAS_QKV,
        defaults={"attention_bias": False, "rms_norm_eps": 1e-8, "rope_theta": 1e5}
        | {"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096},
        fixed={"mlp_bias": False},
    ),
    _GLM.variant(
        "glm4",
        "Glm4ForCausalLM",
        table=norms_after("post_self_attn_layernorm", "post_mlp_layernorm"),
        implied={"branch_norms": "both"},
    ),
    _PLAIN.variant(
        "olmo2",
        "Olmo2ForCausalLM",
        table={
            **norms_after("post_attention_layernorm", "post_feedforward_layernorm"),
            **ALL_HEADS_NORM,
        },
        defaults={"rms_norm_eps": 1e-5},
        fixed={"attention_bias": False},
        implied={"branch_norms": "after", "qk_layernorm": True, "qk_norm_over_heads": True},
    ),
    _LLAMA.variant(
        "granite",
        "GraniteForCausalLM",
        table={},
        keys={"attention_scale": "attention_multiplier", "logits_divisor": "logits_scaling"}
        | {name: name for name in ("embedding_multiplier", "residual_multiplier")},
        defaults={"attention_multiplier": 1.0, "logits_scaling": 1.0}
        | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    ),
    _PLAIN.variant(
        "gemma",
        "GemmaForCausalLM",
        table={},
        defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}
        | {"max_position_embeddings": 8192},
        fixed={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
        | {"use_bidirectional_attention": None},
        implied={"activation": "geglu_tanh", "normalization": "rmsnorm1p"},
        scales_embeddings=True,
    ),
)
_OLMO3 = next(family for family in _LLAMA_LIKE if family.model_type == "olmo2").variant(
    "olmo3",
    "Olmo3ForCausalLM",
    keys={"window_size": "sliding_window"},
    defaults={"sliding_window": 4096, "rope_theta": 5e5},
    window_pattern=4,
)
_GEMMA3 = _LLAMA_LIKE[-1].variant(
    "gemma3_text",
    "Gemma3ForCausalLM",
    table=norms_after(
        "post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm"
    ),
    keys={"window_size": "sliding_window", "attention_scale": "query_pre_attn_scalar"},
    defaults={"sliding_window": 4096, "query_pre_attn_scalar": 256, "rope_theta": 1e6}
    | {"num_key_value_heads": 4, "max_position_embeddings": 131_072},
    fixed={"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": None}
    | {"attn_logit_softcapping": None},
    implied={"branch_norms": "both", "qk_layernorm": True},
    window_pattern=6,
    window_rotary_base=1e4,
)
_FAMILIES = (
    _LLAMA,
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
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA_TABLE,
        _LLAMA_KEYS,
        {**_QWEN_DEFAULTS, "head_dim": 128},
        _QWEN3_FIXED,
        {"qk_layernorm": True},
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
    _QWEN3_MOE,
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
    *_LLAMA_LIKE,
    _OLMO3,
    _GEMMA3,
    _QWEN3_MOE.variant(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        table=QWEN2_MOE_TABLE,
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
            f"{', '.join(FAMILIES)} (SmolLM is a llama)"
        )
    return FAMILIES[model_type]


def architecture_from_hf(config: Mapping[str, Any]) -> GPTArchitecture:
    """Return the architecture that a ``config.json`` describes."""
    family = family_of(config.get("model_type"))
    for key, value in family.fixed.items():
        setting = config.get(key, value)
        is_same = any((key, of, setting) in _SAME for of in (value, family.model_type))
        if setting != value and not is_same:
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
    if architecture.normalization == "layernorm1p":
        return "nemotron"
    if architecture.normalization == "rmsnorm1p":
        return "gemma" if architecture.branch_norms == "before" else "gemma3_text"
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
