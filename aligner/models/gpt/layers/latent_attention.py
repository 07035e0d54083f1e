"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.1).

Queries, keys and values are computed from latents: projections of hidden states to few columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from aligner.kernels.linear_product import ColumnLinear
from aligner.models.gpt.layers.attention import CoreAttention
from aligner.models.gpt.layers.elementwise import Norm
from aligner.models.gpt.layers.fusions import GPTConfig

_EPSILON = 1e-6  # of the norms of latents, whatever the configuration has for the other norms


class NarrowValueAttention(CoreAttention):
    """`CoreAttention` whose values have fewer columns than queries and keys."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Pad float ``value`` [S, B, heads, V] for the attention. Returns [S, B, heads * V]."""
        padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        out = super().forward(query, key, padded, *args, **kwargs)
        return out.unflatten(-1, query.shape[2:])[..., : value.shape[-1]].flatten(-2)


class LatentAttention(Attention):
    """Self-attention of megatron-core whose queries, keys and values are computed from latents.

    Queries and keys begin with rotated columns. All heads have the same rotated columns of keys.
    Every tensor-parallel rank computes all latents and its own heads.
    """

    def __init__(
        self, config: GPTConfig, submodules: SelfAttentionSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, attention_type="self", **kwargs)
        hidden, heads = config.hidden_size, config.num_attention_heads
        rank, value_width = config.kv_lora_rank, config.value_channels
        assert rank is not None
        assert value_width is not None
        self.q_layernorm = self.k_layernorm = None
        # Queries, directly or from latents.
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(hidden, heads * config.kv_channels)
        else:
            self.linear_q_down_proj = self._down(config.q_lora_rank)
            self.q_layernorm = Norm(config, config.q_lora_rank, _EPSILON)
            self.linear_q_up_proj = self._up(config.q_lora_rank, heads * config.kv_channels)
        # Keys without their rotated columns, and values.
        self.linear_kv_down_proj = self._down(rank + config.rotated_channels)
        self.kv_layernorm = Norm(config, rank, _EPSILON)
        columns = config.kv_channels - config.rotated_channels + value_width
        self.linear_kv_up_proj = self._up(rank, heads * columns)
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * value_width,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _down(self, outputs: int) -> nn.Linear:
        """Build a linear layer that is not split over tensor-parallel ranks."""
        config = self.config
        linear = nn.Linear(config.hidden_size, outputs, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(linear.weight)
        linear.weight.sequence_parallel = config.sequence_parallel  # gradients are summed
        return linear

    def _up(self, inputs: int, outputs: int) -> ColumnLinear:
        return ColumnLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query and key, [S, B, heads, D], and value, [S, B, heads, V].

        ``hidden_states``: float ``[S, B, H]``, with sequence parallelism this rank's part of ``S``.
        """
        del args, kwargs  # options that only other attention has
        config = self.config
        # Queries.
        if self.q_layernorm is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _ = self.linear_q_up_proj(latent)
        query = query.unflatten(-1, (-1, config.kv_channels))
        # Keys and values. The columns to be rotated come directly from the hidden states.
        widths = (config.rotated_channels, config.kv_lora_rank)
        rotated, latent = self.linear_kv_down_proj(hidden_states).split(widths, dim=-1)
        mixed, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        widths = (config.kv_channels - config.rotated_channels, config.value_channels)
        fixed, value = mixed.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        # All ranks' heads use the rotated columns, and their gradients are summed.
        if config.sequence_parallel:
            rotated = gather_from_sequence_parallel_region(rotated, group=self.tp_group)
        else:
            rotated = copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)
        rotated = rotated[:, :, None].expand(-1, -1, fixed.shape[2], -1)
        return query, torch.cat((rotated, fixed), dim=-1), value
