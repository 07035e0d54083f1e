"""Conversion between ``config.json`` and `GPTArchitecture` for one model family."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.architecture import Activation, GPTArchitecture, RopeScaling
from aligner.checkpoint.hf.tensors import Table
from aligner.errors import CheckpointError

Config = dict[str, Any]

_GPT2_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
# rope_type → its settings, under the names of the fields of `RopeScaling`.
ORIGINAL = "original_max_position_embeddings"
_ROPE_SETTINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    + (ORIGINAL, "truncate"),
    "longrope": ("short_factor", "long_factor", "attention_factor", ORIGINAL),
}
_OPTIONAL_ROPE_SETTINGS = {*_ROPE_SETTINGS["yarn"]} - {"factor", ORIGINAL}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PARTIAL, _LAYERS = "partial_rotary_factor", "num_hidden_layers"


@dataclass(frozen=True)
class Family:
    """Models with one ``model_type``. "Keys" below are keys of ``config.json``."""

    model_type: str
    table: Table  # names and layouts of the tensors
    keys: Mapping[str, str]  # architecture field → key
    defaults: Mapping[str, Any]  # key → transformers' value if the key is absent
    fixed: Mapping[str, Any]  # key → its only supported value and default
    implied: Mapping[str, Any] = field(default_factory=dict)  # architecture field → its only value
    equal: Mapping[str, str] = field(default_factory=dict)  # keys that must equal another key
    # Default of the rotated share of a head. None: config.json must not give a share but 1.0.
    rotary_percent: float | None = None
    scales_embeddings: bool = False  # multiplies embeddings by the root of their width
    # Default of n: every n-th layer has full attention, the others a window. None: all are alike.
    window_pattern: int | None = None
    window_rotary_base: float | None = None  # default rotary base of layers with a window
    rotates_alike: bool = False  # layers with a window have the rotation of the others

    def variant(self, model_type: str, **changes: Any) -> "Family":
        """Return a copy with ``changes``, whose mappings extend the mappings of this family."""
        extended: dict[str, Any] = {
            name: {**getattr(self, name), **value} if isinstance(value, Mapping) else value
            for name, value in changes.items()
        }
        return dataclasses.replace(self, model_type=model_type, **extended)

    @property
    def model_class(self) -> str:
        """Name of transformers' class of causal language models."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]

    @property
    def _is_gpt2(self) -> bool:
        return self.model_type == "gpt2"

    def read(self, config: Config) -> GPTArchitecture:
        """Return the architecture for ``config``, to which the family's defaults were added."""
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
                    f"{other}={config.get(other)!r} and {key}={config.get(key)!r} in config.json "
                    "differ, which is not supported. Give a model in which both are equal"
                )
        if "moe_router_pre_softmax" in fields:
            fields["moe_router_pre_softmax"] = not fields["moe_router_pre_softmax"]
            # ``num_experts`` became ``num_local_experts`` in transformers 5.
            experts = fields["num_moe_experts"] or config.get("num_local_experts") or 128
            fields["num_moe_experts"] = experts
        if "layers_without_experts" in fields:  # counts in the file
            fields["layers_without_experts"] = tuple(range(fields["layers_without_experts"]))
            width = fields["moe_shared_expert_size"] * fields["moe_ffn_hidden_size"]
            fields["moe_shared_expert_size"] = width or None
        if "layers_without_rope" in fields:  # listed, or every fourth layer
            count, interval = config[_LAYERS], config.get("no_rope_layer_interval") or 4
            rotated = config["no_rope_layers"] or [(n + 1) % interval for n in range(count)]
            fields["layers_without_rope"] = tuple(n for n in range(count) if not rotated[n])
        if self.window_pattern is not None:
            fields |= self._read_windows(config)
        if "attention_scale" in fields and self.model_type.startswith("gemma"):
            fields["attention_scale"] = fields["attention_scale"] ** -0.5
        if "kv_lora_rank" in fields:
            fields |= _read_latent_attention(config, fields)
        if self.scales_embeddings:
            fields["embedding_multiplier"] = math.sqrt(hidden)
        return GPTArchitecture(**{**fields, **self.implied, "family": self.model_type})

    def write(self, architecture: GPTArchitecture) -> Config:
        """Return the content of ``config.json`` for an architecture."""
        # Some families have a default pad_token_id that a small vocabulary lacks.
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
        if "layers_without_experts" in self.keys:
            width = architecture.expert_ffn_hidden_size
            config["first_k_dense_replace"] = len(architecture.layers_without_experts)
            config["n_shared_experts"] = (architecture.moe_shared_expert_size or 0) // width
            config |= {"moe_intermediate_size": width, "num_nextn_predict_layers": 0}
        if "layers_without_rope" in self.keys:
            skipped = architecture.layers_without_rope
            config["no_rope_layers"] = [int(n not in skipped) for n in range(config[_LAYERS])]
        config |= {key: config[other] for key, other in self.equal.items()}
        if self.window_pattern is not None:
            config |= self._written_windows(architecture, config)
        if "attention_scale" in self.keys and self.model_type.startswith("gemma"):
            config["query_pre_attn_scalar"] = round((architecture.attention_scale or 1.0) ** -2)
        if "kv_lora_rank" in self.keys:
            rotated = architecture.rotated_channels
            config |= {"qk_rope_head_dim": rotated, "head_dim": rotated}
            config["qk_nope_head_dim"] = architecture.kv_channels - rotated
        names = {"model_type": self.model_type, "architectures": [self.model_class]}
        return {**config, **names}

    def _read_windows(self, config: Config) -> dict[str, Any]:
        """Return the architecture's fields about layers with a window, and their rotary base."""
        numbers, pattern = range(config[_LAYERS]), config.get("sliding_window_pattern")
        full = {n for n in numbers if (n + 1) % (pattern or self.window_pattern or 1) == 0}
        if config.get("layer_types"):
            full = {n for n in numbers if config["layer_types"][n] == _FULL}
        if len(full) == len(numbers):
            return {"window_size": None}
        windows = {"layers_without_window": tuple(sorted(full))}
        if self.rotates_alike:
            return windows
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
        return {**windows, "window_rotary_base": None if is_same else base}

    def _written_windows(self, architecture: GPTArchitecture, config: Config) -> Config:
        """Return the ``config.json`` keys about layers with a window, and their rotation."""
        numbers, windowed = range(architecture.num_layers), architecture.window_size is not None
        full = architecture.layers_without_window if windowed else numbers
        kinds = {"layer_types": [_FULL if n in full else _SLIDING for n in numbers]}
        base, scaling = config["rope_theta"], config["rope_scaling"] or {"rope_type": "default"}
        if self.rotates_alike:
            return {**kinds, "rope_parameters": {**scaling, "rope_theta": base}}
        local = architecture.window_rotary_base or base
        return {
            **kinds,
            "rope_local_base_freq": local,
            "rope_parameters": {
                _FULL: {**scaling, "rope_theta": base},
                _SLIDING: {"rope_type": "default", "rope_theta": local},
            },
        }

    def _read_rope(self, config: Config) -> dict[str, Any]:
        """Return the architecture's fields about rotation, and ``max_position_embeddings``."""
        # transformers 5 has other keys than earlier versions.
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
        """Return the ``config.json`` keys about rotation, in a form that all versions read."""
        config: Config = {"rope_theta": architecture.rotary_base, "rope_scaling": None}
        scaling = architecture.rope_scaling
        if scaling is not None:
            settings = {name: getattr(scaling, name) for name in _ROPE_SETTINGS[scaling.kind]}
            config["rope_scaling"] = {"rope_type": scaling.kind} | {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in settings.items()
                if value is not None and value is not True
            }
            if scaling.kind == "longrope":
                original = scaling.original_max_position_embeddings
                config |= {ORIGINAL: original}
                config["max_position_embeddings"] = round(original * scaling.factor)
        if self.rotary_percent is not None:
            config[_PARTIAL] = architecture.rotary_percent
        return config


def _read_rope_scaling(config: Config, rope: Config) -> RopeScaling | None:
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
        values[ORIGINAL] = int(config.get(ORIGINAL) or rope.get(ORIGINAL) or positions)
    # Settings that transformers derives from others.
    if kind == "longrope":
        values["factor"] = positions / values[ORIGINAL]
        if rope.get("factor") and rope.get("attention_factor") is None:
            scaling = RopeScaling(
                rope["factor"], original_max_position_embeddings=values[ORIGINAL], kind="longrope"
            )
            values["attention_factor"] = scaling.concentration
    # An absent setting has its default, if it has one.
    settings: dict[str, Any] = {"kind": kind, "factor": float(values["factor"])}
    for name in _ROPE_SETTINGS[kind]:
        if name in _OPTIONAL_ROPE_SETTINGS and values.get(name) is None:
            continue
        value = values[name]
        if isinstance(value, list | tuple):
            settings[name] = tuple(map(float, value))
        else:
            settings[name] = value if name in (ORIGINAL, "truncate") else float(value)
    return RopeScaling(**settings)


def _read_latent_attention(config: Config, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return widths, rotated share and scale of the scores of latent attention."""
    rotated = config["qk_rope_head_dim"]
    width = config["qk_nope_head_dim"] + rotated
    scaling, scale = fields["rope_scaling"], None
    if scaling is not None and scaling.mscale_all_dim:
        scale = width**-0.5 * scaling.yarn_factor(scaling.mscale_all_dim) ** 2
    return {
        "num_query_groups": fields["num_attention_heads"],
        "kv_channels": width,
        # The next larger number, because a smaller product would be rounded down.
        "rotary_percent": min(math.nextafter(rotated / width, 1.0), 1.0),
        "attention_scale": scale,
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
