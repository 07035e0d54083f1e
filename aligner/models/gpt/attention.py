"""Core attention on `scaled_dot_product_attention`, where Transformer Engine is absent.

megatron-core's own local core attention is unfused (it materialises ``[heads, S, S]`` scores) and
is replaced by this one in our layer spec. The same module serves generation: with a key-value
cache attached, attention is left to the cache.
"""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from aligner.errors import LayoutError


class AttentionCache(Protocol):
    """What generation attaches to `CoreAttention`."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value, attend over everything stored; ``[S, B, heads * D]``."""
        ...


class CoreAttention(MegatronModule):
    """Causal (optionally sliding-window) grouped-query attention.

    Sequences are right-padded, so causality alone keeps valid positions from seeing padding and no
    mask is passed. ``cache`` is None in training.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type, pg_collection  # one way to communicate; heads are already this rank's
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise LayoutError(
                f"core attention is causal self-attention; got {attention_type}, {attn_mask_type}"
            )
        if config.context_parallel_size > 1:
            raise LayoutError(
                f"model.context_parallel_size={config.context_parallel_size} needs Transformer "
                "Engine in this version; set it to 1"
            )
        self.layer_number = max(1, layer_number)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window: int | None = config.window_size[0] + 1 if config.window_size else None
        self.cache: AttentionCache | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[S, B, heads, D]``, rotary embedding applied.
            key: ``[S, B, groups, D]``.
            value: ``[S, B, groups, D]``.
            attention_mask: must be None; see the class.
            attn_mask_type: causal.
            attention_bias: must be None.
            packed_seq_params: must be None in this version.

        Returns:
            ``[S, B, heads * D]``.
        """
        assert attention_mask is None
        assert attention_bias is None
        assert packed_seq_params is None
        assert attn_mask_type in (None, AttnMaskType.causal)
        if self.cache is not None:
            return self.cache.attend(self.layer_number, query, key, value)
        length, batch, heads, _ = query.shape
        windowed = self.window is not None and length > self.window
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=_window_mask(length, self.window, query.device) if windowed else None,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=not windowed,
            scale=self.scale,
            enable_gqa=key.shape[2] != heads,
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool ``[S, S]``, True where query i may see key j: ``i - window < j <= i``."""
    assert window is not None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)
