"""Core attention on `scaled_dot_product_attention`, where Transformer Engine is absent.

megatron-core's own local core attention is unfused (it materialises ``[heads, S, S]`` scores) and
is replaced by this one in our layer spec. The same module serves generation: with a key-value
cache attached, attention is left to the cache. Packed and context-parallel passes come with the
`Segments` with the rows that attend to each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.errors import LayoutError
from aligner.kernels.linear_product import Origin
from aligner.models.gpt.layers.segments import Segments, SlotCopies, add_rows, take_rows
from aligner.models.gpt.layers.varlen import attend_varlen, can_attend_varlen


class AttentionCache(Protocol):
    """Cache that generation attaches to `CoreAttention`."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value, attend over everything stored; float ``[S, B, heads * D]``."""
        ...


@dataclass
class SegmentParams(PackedSeqParams):
    """Takes `Segments` through megatron-core's layers to `CoreAttention`.

    It travels as an argument, not as a setting around the forward pass, because recomputed
    activations call the attention again in the backward pass. ``qkv_format`` is not ``thd``:
    the layers treat the rows as one ordinary sequence.
    """

    qkv_format: str = "sbhd"
    segments: Segments | None = None


class CoreAttention(MegatronModule):
    """Causal (optionally sliding-window) grouped-query attention.

    Sequences are right-padded, so causality keeps valid positions from seeing padding and no
    mask is passed. ``cache`` is None in training.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
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
        packed_seq_params: SegmentParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: float ``[S, B, heads, D]``, rotary embedding applied.
            key: ``[S, B, groups, D]``.
            value: ``[S, B, groups, D]``.
            attention_mask: must be None; see the class.
            attn_mask_type: causal.
            attention_bias: must be None.
            packed_seq_params: the sequences that stand in the ``S`` rows (``B`` is 1); None: each
                row of the batch is one.

        Returns:
            ``[S, B, heads * D]``.
        """
        assert attention_mask is None
        assert attention_bias is None
        assert attn_mask_type in (None, AttnMaskType.causal)
        if self.cache is not None:
            return self.cache.attend(self.layer_number, query, key, value)
        length, batch = query.shape[:2]
        if packed_seq_params is not None:
            assert batch == 1
            assert packed_seq_params.segments is not None
            rows = attend_segments(
                query[:, 0],
                key[:, 0],
                value[:, 0],
                packed_seq_params.segments,
                self.window,
                scale=self.scale,
                dropout=self._dropout,
            )
            joined = rows.reshape(length, 1, -1)
            origin = Origin.of(rows)
            return joined if origin is None else origin.note(joined)
        out = attend_rows(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            self.window,
            scale=self.scale,
            dropout=self._dropout,
        )
        return Origin(_joined, (out.detach(),)).note(_joined(out))

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention, float ``[B, heads, S, D]``; ``window``: positions seen, own included."""
    length = query.shape[2]
    windowed = window is not None and length > window
    mask = _window_mask(length, window, query.device) if windowed else None
    return attend(query, key, value, mask, scale, dropout)


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    window: int | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Float rows ``[R, heads, D]`` of packed sequences; rows that belong to none become 0."""
    if not segments.buckets:  # all three have a gradient, of zeros, which other ranks may wait for
        return query * 0.0 + (key.sum() + value.sum()) * 0.0
    key, value = segments.gathered(key, value)
    if can_attend_varlen(query, dropout, window):
        return attend_varlen(query, key, value, segments, scale, window)
    slots = [bucket.sequences * bucket.queries for bucket in segments.buckets]
    parts = []
    for bucket, queries, keys, values, places in zip(
        segments.buckets,
        segments.queries.to_slots(query).split(slots),
        *_keys_of_buckets(key, value, segments),
        strict=True,
    ):
        out = attend(
            _by_sequence(queries, bucket.sequences),
            keys,
            values,
            bucket.mask(window, query.device),
            scale,
            dropout,
            places,
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))

    def rows_of(*parts: Tensor) -> Tensor:
        return segments.queries.to_rows(torch.cat(parts))

    # The linear that follows keeps the parts, which attention keeps anyway, and not the rows.
    return Origin(rows_of, tuple(part.detach() for part in parts)).note(rows_of(*parts))


def _keys_of_buckets(
    key: Tensor, value: Tensor, segments: Segments
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Keys, values and places of every bucket, as `attend` takes them."""
    slots = [bucket.sequences * bucket.keys for bucket in segments.buckets]
    if isinstance(segments.keys, SlotCopies) and key.device.type == "cpu":
        # A prefix is taken for all that follow it, in the backward pass again: nothing is kept.
        places = segments.keys.rows.split(slots)
        return [_alone(key)] * len(slots), [_alone(value)] * len(slots), places
    keys, values = (
        [
            _by_sequence(part, bucket.sequences)
            for part, bucket in zip(
                segments.keys.to_slots(rows).split(slots), segments.buckets, strict=True
            )
        ]
        for rows in (key, value)
    )
    return keys, values, [None] * len(slots)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    places: Tensor | None = None,
) -> Tensor:
    """Float ``[B, heads, S, D]`` each; causal where ``mask`` (true: seen) is None.

    ``places``: int64 ``[B * S]``; where it is given, keys and values are rows ``[R, groups, D]``,
    of which those at the places are meant.
    """
    if query.device.type == "cpu" and dropout == 0.0 and torch.is_grad_enabled():
        return _CPUFlashAttention.apply(query, key, value, places, mask, scale)
    if places is not None:
        key, value = (
            _by_sequence(take_rows(each, places), query.shape[0]) for each in (key, value)
        )
    groups = query.shape[1] // key.shape[1]
    flash = mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and query.is_cuda and not flash:
        # Only flash attention knows grouped queries. Without it PyTorch would take the one kernel
        # that does and that has all scores in memory, [heads, S, S].
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


class _CPUFlashAttention(torch.autograd.Function):
    """`scaled_dot_product_attention` on CPU that keeps grouped keys and values once.

    PyTorch's own keeps them repeated for every query head, and for every place of a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: Tensor | None,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            _for_heads(key, places, query),
            _for_heads(value, places, query),
            0.0,
            mask is None,
            attn_mask=_bias(mask, query.dtype),
            scale=scale,
        )
        ctx.save_for_backward(*map(_alone, (query, key, value)), places, mask, out, sums)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, places, mask, out, sums = ctx.saved_tensors
        by_query, by_key, by_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                query,
                _for_heads(key, places, query),
                _for_heads(value, places, query),
                out,
                sums,
                0.0,
                mask is None,
                attn_mask=_bias(mask, query.dtype),
                scale=ctx.scale,
            )
        )
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            by_key = by_key.unflatten(1, (-1, groups)).sum(2)
            by_value = by_value.unflatten(1, (-1, groups)).sum(2)
        if places is not None:
            by_key, by_value = (
                add_rows(each.transpose(1, 2).flatten(0, 1), places, key.shape[0])
                for each in (by_key, by_value)
            )
        return by_query, by_key, by_value, None, None, None


def _for_heads(keys: Tensor, places: Tensor | None, query: Tensor) -> Tensor:
    """Keys or values ``[B, heads, S, D]`` for every head of ``query``; arguments as in `attend`."""
    if places is not None:
        keys = _by_sequence(keys.index_select(0, places), query.shape[0])
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)


def _alone(tensor: Tensor) -> Tensor:
    """``tensor``, copied where it would keep the memory of more than itself."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """0 where the bool ``mask`` is true, -inf elsewhere, same shape; None for None."""
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _joined(out: Tensor) -> Tensor:
    """``[B, heads, S, D]`` to ``[S, B, heads * D]``."""
    return out.permute(2, 0, 1, 3).flatten(2)


def _by_sequence(slots: Tensor, sequences: int) -> Tensor:
    """``[sequences * L, heads, D]`` to ``[sequences, heads, L, D]``."""
    return slots.unflatten(0, (sequences, -1)).transpose(1, 2)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool ``[S, S]``, True where query i may see key j: ``i - window < j <= i``."""
    assert window is not None
    position = torch.arange(length, device=device)
    first = position[:, None] - window + 1
    return (position <= position[:, None]) & (position >= first)
