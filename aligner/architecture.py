"""What a GPT looks like, independent of who wrote its checkpoint.

``GPTArchitecture`` is the one description that everything else is derived from: NeMo's
``model_config.yaml`` and Hugging Face's ``config.json`` are read into it (``checkpoint/``)
and megatron-core's ``TransformerConfig`` is made out of it (``models/gpt/build.py``).
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "swiglu", "geglu", "squared_relu", "relu", "silu"]
Normalization = Literal["layernorm", "layernorm1p", "rmsnorm"]
PositionEmbedding = Literal["rope", "learned_absolute", "none"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent rope scaling; ``factor`` only gives linear interpolation."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    kind: Literal["llama3", "linear"] = "llama3"


@dataclass(frozen=True)
class GPTArchitecture:
    """Shape and kind of a decoder-only transformer. Sizes are global, never per rank.

    ``vocab_size`` is the tokenizer's; the embedding has ``padded_vocab_size(tp)`` rows and the
    surplus columns of the output layer never take part in a softmax.
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
    normalization: Normalization = "rmsnorm"
    layernorm_epsilon: float = 1e-5
    position_embedding: PositionEmbedding = "rope"
    rotary_base: float = 10_000.0
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    bias_linear: bool = False  # biases on proj, fc1, fc2 (and on qkv)
    bias_qkv: bool = False  # biases on qkv alone (Qwen2)
    qk_layernorm: bool = False  # Qwen3
    window_size: int | None = None  # sliding-window attention (Mistral 7B v0.1)
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    make_vocab_size_divisible_by: int = 128
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None  # of one expert; None: ffn_hidden_size
    # Expert weights are a softmax over all experts, not over the chosen ones (Qwen3-MoE's option).
    moe_router_pre_softmax: bool = False
    # The Hugging Face `model_type` this came from or should be exported as; None: not known.
    family: str | None = None

    @property
    def gated(self) -> bool:
        """Whether fc1 holds ``[gate; up]``."""
        return self.activation in ("swiglu", "geglu")

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Inner width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def with_dropout(self, probability: float | None) -> "GPTArchitecture":
        """The same with this dropout, of attention and of hidden states; None: with its own."""
        if probability is None:
            return self
        return dataclasses.replace(self, attention_dropout=probability, hidden_dropout=probability)

    def padded_vocab_size(self, tensor_parallel_size: int = 1) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple every rank can share."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple
