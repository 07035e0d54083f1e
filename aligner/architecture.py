"""Description of a GPT, independent of the format of its checkpoint.

``checkpoint/`` converts NeMo's ``model_config.yaml`` and Hugging Face's ``config.json`` to a
``GPTArchitecture``, and ``models/gpt/megatron/build.py`` to megatron-core's ``TransformerConfig``.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from aligner.errors import CheckpointError

# Maximum of layers * experts. The tensor names of a larger model would exhaust the memory.
_MOST_BLOCKS = 100_000
_SHARES = ("attention_dropout", "hidden_dropout", "rotary_percent")

# "clamped_swiglu" (GPT-OSS) is (up + 1) * gate * sigmoid(1.702 * gate).
_GatedActivation = Literal["swiglu", "clamped_swiglu", "geglu", "geglu_tanh"]
Activation = Literal[_GatedActivation, "gelu", "gelu_tanh", "squared_relu", "relu", "silu"]
Normalization = Literal["layernorm", "layernorm1p", "rmsnorm", "rmsnorm1p"]
BranchNorms = Literal["before", "after", "both"]
PositionEmbedding = Literal["rope", "learned_absolute", "none"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the frequencies of rotary position embeddings (RoPE).

    ``linear`` divides all frequencies by ``factor``. ``llama3`` and ``yarn`` (Peng et al. 2023)
    divide only low frequencies. ``longrope`` (Ding et al. 2024) divides each frequency by its
    ``short_factor``. Longer sequences, which would need ``long_factor``, are not supported.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    kind: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # see `concentration`. None: computed by ``kind``
    truncate: bool = True  # yarn: round the bounds of the interpolated frequencies
    mscale: float | None = None  # of ``yarn``, in place of an attention factor (DeepSeek-V3)
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()  # exported only

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            _check(f"rope_scaling.{name}", value, _is_number(value) and value > 0, "positive")
        positions = self.original_max_position_embeddings
        name = "rope_scaling.original_max_position_embeddings"
        _check(name, positions, _is_size(positions), "a positive integer")
        kinds = ("llama3", "linear", "yarn", "longrope")
        _check("rope_scaling.kind", self.kind, self.kind in kinds, f"one of {', '.join(kinds)}")
        for factor in (*self.short_factor, *self.long_factor, self.concentration):
            _check("rope_scaling", factor, _is_number(factor) and factor > 0, "positive numbers")

    @property
    def concentration(self) -> float:
        """Factor by which queries and keys are multiplied after the rotation."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.yarn_factor(self.mscale) / self.yarn_factor(self.mscale_all_dim)
        stretch = math.log(max(self.factor, 1.0))
        if self.kind == "longrope":
            return math.sqrt(1.0 + stretch / math.log(self.original_max_position_embeddings))
        return self.yarn_factor(1.0) if self.kind == "yarn" else 1.0

    def yarn_factor(self, scale: float) -> float:
        """Return yarn's attention factor ``1 + 0.1 * scale * ln(factor)``."""
        return 1.0 + 0.1 * scale * math.log(max(self.factor, 1.0))


@dataclass(frozen=True)
class GPTArchitecture:
    """Sizes and options of a decoder-only transformer. Sizes are those of the whole model.

    ``vocab_size`` is the size of the tokenizer's vocabulary. The embedding and the output layer
    have ``padded_vocab_size(tp)`` rows. The softmax ignores the logits of the padding.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    activation: Activation = "swiglu"
    activation_clamp: float | None = None  # upper bound of gate and of abs(up) (GPT-OSS)
    normalization: Normalization = "rmsnorm"
    layernorm_epsilon: float = 1e-5
    position_embedding: PositionEmbedding = "rope"
    rotary_base: float = 10_000.0
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling | None = None
    layers_without_rope: tuple[int, ...] = ()  # from 0 (SmolLM 3)
    tie_embeddings: bool = False
    bias_linear: bool = False  # biases on proj, fc1, fc2 (and on qkv)
    bias_qkv: bool = False  # biases on qkv only (Qwen2)
    qk_layernorm: bool = False  # Qwen3
    qk_norm_over_heads: bool = False  # q/k norms over all heads together (OLMo 2)
    branch_norms: BranchNorms = "before"  # of attention and MLP: GLM-4 0414 both, OLMo 2 after
    attention_scale: float | None = None  # factor of the scores (None: 1 / sqrt(kv_channels))
    attention_sinks: bool = False  # a score of each head that takes a share of softmax (GPT-OSS)
    attention_cap: float | None = None  # c of scores s, which become c * tanh(s / c) (Gemma 2)
    embedding_multiplier: float = 1.0  # Gemma, Granite
    residual_multiplier: float = 1.0  # of what attention and MLP add (Granite)
    logits_divisor: float = 1.0  # Granite
    logits_cap: float | None = None  # as attention_cap, of the logits (Gemma 2)
    window_size: int | None = None  # sliding-window attention (Mistral 7B v0.1)
    layers_without_window: tuple[int, ...] = ()  # from 0 (OLMo 3, Gemma 3)
    window_rotary_base: float | None = None  # of layers with a window, unscaled. None: as others
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    make_vocab_size_divisible_by: int = 128
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None  # of one expert (None: ffn_hidden_size)
    # Softmax over all experts before the selection, not over the selected experts (Qwen3-MoE).
    moe_router_pre_softmax: bool = False
    # Width of an expert that all tokens use, and whether a gate scales its output (Qwen2-MoE).
    moe_shared_expert_size: int | None = None
    moe_shared_expert_gate: bool = False
    layers_without_experts: tuple[int, ...] = ()  # from 0, with a dense MLP (GLM-4.5)
    # Sigmoid router (GLM-4.5, DeepSeek-V3): groups of experts and how many of them a token uses,
    # whether the selected scores are divided by their sum, and a factor of them.
    moe_router_sigmoid: bool = False
    moe_router_groups: int = 1
    moe_router_group_topk: int = 1
    moe_router_normalizes: bool = True
    moe_router_scale: float = 1.0
    # Latent attention (DeepSeek-V3): ranks of the projections to query (None: one projection) and
    # to key and value, and the width of a head's value. Query and key have kv_channels columns.
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    value_channels: int | None = None
    # Hugging Face `model_type` of the source and of exports. None if unknown.
    family: str | None = None
    # Suffix of the file to which a run writes such a model.
    suffix: ClassVar[str] = ".nemo"
    has_table: ClassVar[bool] = True  # of tensors by canonical names, also for .nemo files

    def __post_init__(self) -> None:
        # Single values, by the types of their fields.
        for field in dataclasses.fields(GPTArchitecture):
            name, value, hints = field.name, getattr(self, field.name), get_args(field.type)
            kind = hints[0] if type(None) in hints else field.type
            if value is None and kind is not field.type:
                continue
            if kind is int:
                _check(name, value, _is_size(value), "a positive integer")
            elif name in _SHARES:
                _check(name, value, _is_number(value) and 0 <= value <= 1, "between 0 and 1")
            elif kind is float:
                is_valid = _is_number(value) and value >= 0
                _check(name, value, is_valid, "a finite number of 0 or more")
            elif kind is bool:
                _check(name, value, isinstance(value, bool), "true or false")
        kinds = ("before", "after", "both")
        expected = f"one of {', '.join(kinds)}"
        _check("branch_norms", self.branch_norms, self.branch_norms in kinds, expected)

        # Numbers of layers, experts and heads.
        blocks = self.num_layers * (self.num_moe_experts or 1)
        name = "num_layers" if self.num_layers > _MOST_BLOCKS else "num_moe_experts"
        smaller = f"smaller: the model may have at most {_MOST_BLOCKS} layers * experts"
        _check(name, getattr(self, name), blocks <= _MOST_BLOCKS, smaller)
        divides = self.num_attention_heads % self.num_query_groups == 0
        divisor = f"a divisor of num_attention_heads={self.num_attention_heads}"
        _check("num_query_groups", self.num_query_groups, divides, divisor)
        width, is_latent = self.value_channels, self.kv_lora_rank is not None
        fits = (width is not None) is is_latent and (width or 0) <= self.kv_channels
        expected = f"at most kv_channels={self.kv_channels} with kv_lora_rank, else null"
        _check("value_channels", width, fits, expected)
        groups, experts = self.moe_router_groups, self.num_moe_experts or 0
        fits = self.moe_router_group_topk <= groups <= experts // 2 and experts % groups == 0
        expected = "a divisor of num_moe_experts with 2 experts or more in each group"
        _check("moe_router_groups", groups, fits or groups == 1, expected)

        # Layers and frequencies of the rotation.
        for name in ("layers_without_rope", "layers_without_window", "layers_without_experts"):
            layers = getattr(self, name)
            valid = all(_is_number(n) and 0 <= n < self.num_layers for n in layers)
            _check(name, layers, valid, f"layer numbers below num_layers={self.num_layers}")
        scaling = self.rope_scaling
        is_long = scaling is not None and scaling.kind == "longrope"
        valid = self.window_rotary_base is None or (self.rotary_percent == 1.0 and not is_long)
        expected = "null if rotary_percent < 1 or the rope type is longrope"
        _check("window_rotary_base", self.window_rotary_base, valid, expected)
        if scaling is not None and is_long:
            count = self.rotated_channels // 2
            for name in ("short_factor", "long_factor"):
                factors = getattr(scaling, name)
                _check(f"rope_scaling.{name}", factors, len(factors) == count, f"{count} numbers")

    @cached_property
    def rope_concentration(self) -> float:
        """Factor by which queries and keys are multiplied after the rotation. 1 without scaling."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.concentration

    @property
    def rotated_channels(self) -> int:
        """Number of channels of each head to which RoPE is applied."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def gated(self) -> bool:
        """True if the MLP has a gated activation. Its first weight has the rows ``[gate; up]``."""
        return self.activation in get_args(_GatedActivation)

    @property
    def is_scored(self) -> bool:
        """True if the model has sinks or soft caps, which fused kernels do not support."""
        has_cap = self.attention_cap is not None or self.logits_cap is not None
        return self.attention_sinks or has_cap

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Hidden size of one expert's MLP."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def with_dropout(self, probability: float | None) -> "GPTArchitecture":
        """Return a copy with this attention and hidden dropout. If None, return this object."""
        if probability is None:
            return self
        return dataclasses.replace(self, attention_dropout=probability, hidden_dropout=probability)

    def padded_vocab_size(self, tensor_parallel_size: int = 1) -> int:
        """Return the number of embedding rows: ``vocab_size``, padded to equal parts per rank."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class TransformersArchitecture(GPTArchitecture):
    """Architecture of a model that only transformers supports, not megatron-core.

    Memory estimates use the inherited sizes. A size that the model does not define is 1.
    """

    settings: str = "{}"  # text of ``config.json``
    code: str = ""  # the directory, if its own code builds the model
    suffix: ClassVar[str] = ""
    has_table: ClassVar[bool] = False


def layer_flags(
    layers: tuple[int, ...], architecture: GPTArchitecture, *, invert: bool = False
) -> list[int] | None:
    """Return 1 for layers in ``layers``, else 0, or the reverse. None if ``layers`` is empty."""
    flags = [int((n in layers) is not invert) for n in range(architecture.num_layers)]
    return flags if layers else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check(name: str, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid or (isinstance(value, bool) and expected != "true or false"):
        text = repr(value)
        text = text if len(text) <= 60 else f"{text[:60]}..."
        raise CheckpointError(
            f"the model's description has {name}={text}, which must be {expected}. Correct "
            "model_config.yaml or config.json"
        )
