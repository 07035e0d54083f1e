"""Self-attention over short sequences on a CPU, as a single autograd function.

For short sequences, the overhead of many operations exceeds their arithmetic. The probabilities
``[heads, S, S]`` of each sequence are saved for backward. `MAX_LENGTH` therefore limits ``S``.

Shape legend: ``S`` length, ``B`` sequences, ``G`` key-value heads, ``R`` query heads per key-value
head, ``D`` head width, ``D_rot`` its rotated part. Packed heads are ``[B, G, R + 2, S, D]``: each
key-value head's queries, its key, its value.
"""

import copy
import functools
import math
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.device import accelerator
from aligner.models.gpt.layers.attention import CoreAttention
from aligner.models.gpt.layers.fusions import GPTConfig

MAX_LENGTH = 128


class HeadRotation(NamedTuple):
    """Cosines and sines of rotary embedding. For queries, they include the scale of the scores.

    ``cos``: float ``[S, 1, 1, R + 2, D]``, 1 (queries: the scale) in columns without rotation.
    ``sin``: float ``[S, 1, 1, R + 1, D_rot / 2]``.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, heads: Tensor, rotated: Tensor) -> None:
        """Rotate queries and keys of ``heads``, scale the queries, and write all to ``rotated``.

        Both are float ``[S, B, G, R + 2, D]``.
        """
        torch.mul(heads, self.cos, out=rotated)
        _add_quarter_turn(heads[..., :-1, :], rotated[..., :-1, :], self.sin)

    def undo(self, rotated: Tensor, heads: Tensor, first: int) -> None:
        """Write the gradient of ``heads[..., first : first + n, :]`` to ``heads``.

        ``rotated``: gradient after rotation, float ``[S, B, G, n, D]``.
        """
        selected = slice(first, first + rotated.shape[3])
        target = heads[..., selected, :]
        torch.mul(rotated, self.cos[..., selected, :], out=target)
        _add_quarter_turn(rotated, target, self.sin[..., selected, :], sign=-1.0)


def _add_quarter_turn(source: Tensor, target: Tensor, sin: Tensor, sign: float = 1.0) -> None:
    """Add the sine terms of the rotation of ``source`` [..., D] to ``target``."""
    half = sin.shape[-1]  # columns i and i + half are paired
    first, second = slice(0, half), slice(half, 2 * half)
    target[..., first].addcmul_(source[..., second], sin, value=-sign)
    target[..., second].addcmul_(source[..., first], sin, value=sign)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Rotate into the packed buffer, which the backward pass reads.
        length, batch, groups, heads, width = mixed.shape
        packed = mixed.new_empty(batch, groups, heads, length, width)
        HeadRotation(cos, sin).apply(mixed, packed.permute(3, 0, 1, 2, 4))
        # Probabilities, in the buffer of the scores.
        query, key, value = _parts(packed)
        causal = _causal_bias(length, heads - 2, mixed.dtype)
        scores = torch.baddbmm(causal, query, key.transpose(1, 2))
        shares = torch.softmax(scores, dim=-1, out=scores)
        ctx.save_for_backward(packed, shares, cos, sin)
        attended = torch.bmm(shares, value).view(batch, groups, heads - 2, length, width)
        return attended.permute(3, 0, 1, 2, 4).reshape(length, batch, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        packed, shares, cos, sin = ctx.saved_tensors
        batch, groups, heads, length, width = packed.shape
        query, key, value = _parts(packed)
        # Gradients of the probabilities, then of the scores, in one buffer.
        by_head = grad.view(length, batch, groups, heads - 2, width).permute(1, 2, 3, 0, 4)
        rows = by_head.reshape(batch * groups, -1, width)
        scores = torch.bmm(rows, value.transpose(1, 2))
        torch.ops.aten._softmax_backward_data.out(
            scores, shares, -1, shares.dtype, grad_input=scores
        )
        by_query, by_key, by_value = (
            part.view(batch, groups, -1, length, width).permute(3, 0, 1, 2, 4)
            for part in (
                torch.bmm(scores, key),
                torch.bmm(scores.transpose(1, 2), query),
                torch.bmm(shares.transpose(1, 2), rows),
            )
        )
        # Undo the rotation into the gradient of the qkv projection's output.
        mixed = packed.new_empty(length, batch, groups, heads, width)
        rotation = HeadRotation(cos, sin)
        rotation.undo(by_query, mixed, 0)
        rotation.undo(by_key, mixed, heads - 2)
        mixed[..., -1:, :] = by_value
        return mixed, None, None


@functools.lru_cache(maxsize=8)
def _causal_bias(length: int, queries: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        bias = torch.full((length, length), -math.inf, dtype=dtype)
        return bias.triu_(1).repeat(queries, 1)


@functools.lru_cache(maxsize=8)
def _head_rotation(
    angles: Tensor, queries: int, width: int, scale: float, dtype: torch.dtype
) -> HeadRotation:
    """Return the `HeadRotation` of ``angles``. All layers get the same object."""
    with torch.inference_mode(False), torch.no_grad():
        angles = angles.to(dtype).unsqueeze(3)  # both halves of the columns are equal
        length, rotated = angles.shape[0], angles.shape[-1]
        cos = angles.new_ones(length, 1, 1, queries + 2, width)
        cos[..., : queries + 1, :rotated] = angles.cos()
        cos[..., :queries, :] *= scale
        sin = angles[..., : rotated // 2].sin().repeat(1, 1, 1, queries + 1, 1)
        sin[..., :queries, :] *= scale
        return HeadRotation(cos, sin)


def _parts(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View packed heads as query ``[B * G, R * S, D]``, key and value ``[B * G, S, D]``."""
    rows = packed.flatten(0, 1)
    return rows[:, :-2].flatten(1, 2), rows[:, -2], rows[:, -1]


def short_attention(mixed: Tensor, angles: Tensor, scale: float) -> Tensor:
    """Compute causal grouped-query attention with rotary embedding, ``[S, B, G * R * D]``.

    ``mixed``: float ``[S, B, G, R + 2, D]``, output of the qkv projection. ``angles``: ``[S, 1, 1,
    D_rot]``, megatron-core's rotary table. ``scale``: factor of the scores.
    """
    queries, width = mixed.shape[3] - 2, mixed.shape[4]
    rotation = _head_rotation(angles, queries, width, scale, mixed.dtype)
    return _ShortAttention.apply(mixed, *rotation)


class ShortSelfAttention(SelfAttention):
    """megatron-core's self-attention that uses `short_attention` for short sequences on CPU.

    Windowed layers may have a separate rotary base (``config.window_rotary_base``).
    """

    def __init__(self, config: GPTConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        base, width = config.window_rotary_base, config.kv_channels
        self.frequencies: Tensor | None = None
        if base is not None and self.core_attention.window is not None:
            inverse = base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
            # The first column of megatron-core's angles is the position, divided by a scale.
            frequencies = config.rotary_scale * torch.cat((inverse, inverse))
            self.frequencies = frequencies.to(accelerator.device())
            self.config = copy.copy(config)
            self.config.yarn_mscale = 0.0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output ``[S, B, H]``, without the bias, and the bias (or None)."""
        if self.frequencies is not None and rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb[..., :1] * self.frequencies
        # Any other argument (cache, external keys, attention sinks, …) needs the general code.
        options = (attention_mask, packed_seq_params, *arguments.values())
        plain = rotary_pos_emb is not None and all(option is None for option in options)
        if not plain or not self._is_short(hidden_states, rotary_pos_emb):
            return super().forward(
                hidden_states,
                attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **arguments,
            )
        # One operation from the qkv projection to the output projection.
        mixed, _ = self.linear_qkv(hidden_states)
        heads = mixed.view(
            *mixed.shape[:2],
            self.num_query_groups_per_partition,
            -1,
            self.hidden_size_per_attention_head,
        )
        attended = short_attention(heads, rotary_pos_emb, self.core_attention.scale)
        return self.linear_proj(attended)

    def _is_short(self, hidden: Tensor, angles: Tensor) -> bool:
        # The operation supports float32, causal attention and rotary embedding without options.
        core, length = self.core_attention, angles.shape[0]
        return (
            hidden.device.type == "cpu"
            and hidden.dtype == torch.float32
            and length <= min(MAX_LENGTH, getattr(core, "window", None) or MAX_LENGTH)
            and angles.shape[1:3] == (1, 1)
            and type(core) is CoreAttention
            and core.cached is None
            and not (self.training and (core.dropout or self.checkpoint_core_attention))
            and isinstance(self.q_layernorm or IdentityOp(), IdentityOp)
            and self.world_size <= self.config.num_query_groups
            and not self.config.rotary_interleaved
            and not self.config.yarn_mscale  # no factor of rotated heads
            and not (self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1])
        )
