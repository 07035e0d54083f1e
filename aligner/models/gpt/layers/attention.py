"""Core attention on `scaled_dot_product_attention`, in place of megatron-core's unfused one.

Generation attaches a key-value cache to the module. In packed and context-parallel passes,
`Segments` describe which rows attend to each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.kernels.linear_product import Origin
from aligner.models.gpt.layers.segments import Bucket, Segments, add_rows, take_rows
from aligner.models.gpt.layers.varlen import attend_varlen, can_attend_varlen

# Stores key and value of the layer of a number, and attends to all stored keys. Maps the number and
# query, key and value as `CoreAttention.forward` has them to float ``[S, B, heads * D]``.
CachedAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class SegmentParams(PackedSeqParams):
    """Carrier of `Segments` through megatron-core's layers to `CoreAttention`.

    Activation recomputation calls the attention again in the backward pass, so the segments are an
    argument. ``qkv_format`` is not ``thd``: the layers treat the rows as one sequence.
    """

    qkv_format: str = "sbhd"
    segments: Segments | None = None


class CoreAttention(MegatronModule):
    """Causal (optionally sliding-window) grouped-query attention.

    Sequences are right-padded, so valid positions never attend to padding and no mask is passed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attention_type == "self"
        assert attn_mask_type == AttnMaskType.causal
        self.layer_number = max(1, layer_number)
        self.dropout = config.attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        ):
            self.window = config.window_size[0] + 1
        self.cached: CachedAttention | None = None  # of generation

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
        """Compute causal attention, ``[S, B, heads * D]``.

        ``query``: float ``[S, B, heads, D]``, rotary embedding applied. ``key``, ``value``: ``[S,
        B, groups, D]``. ``packed_seq_params``: the sequences in the ``S`` packed rows (``B`` is 1).
        Without it each batch row is one sequence. Mask and bias must be None.
        """
        assert attention_mask is None
        assert attention_bias is None
        assert attn_mask_type in (None, AttnMaskType.causal)
        if self.cached is not None:
            return self.cached(self.layer_number, query, key, value)
        length, batch = query.shape[:2]
        dropout = self.dropout if self.training else 0.0
        if packed_seq_params is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out = attend_rows(query, key, value, self.window, scale=self.scale, dropout=dropout)
            return Origin(_join_heads, (out.detach(),)).note(_join_heads(out))
        # Packed: one long row. The output keeps the origin that `attend_segments` noted.
        assert batch == 1
        assert packed_seq_params.segments is not None
        rows = attend_segments(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            packed_seq_params.segments,
            self.window,
            scale=self.scale,
            dropout=dropout,
        )
        joined = rows.reshape(length, 1, -1)
        origin = Origin.of(rows)
        return joined if origin is None else origin.note(joined)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute causal attention, float ``[B, heads, S, D]``.

    ``window``: number of positions that a query attends to, including its own. None: all.
    """
    mask, length = None, query.shape[2]
    if window is not None and length > window:
        position = torch.arange(length, device=query.device)
        first = position[:, None] - window + 1
        mask = (position <= position[:, None]) & (position >= first)
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
    """Compute attention within packed sequences, float ``[R, heads, D]``, 0 outside sequences."""
    # Without sequences the gradients are zeros, not None: other ranks may wait for them.
    if not segments.buckets:
        return query * 0.0 + (key.sum() + value.sum()) * 0.0
    key, value = segments.gather_keys(key, value)
    if can_attend_varlen(query, dropout, window):
        return attend_varlen(query, key, value, segments, scale, window)

    # Without the kernel, each bucket is one padded batch.
    def attend_bucket(
        bucket: Bucket, queries: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor | None
    ) -> Tensor:
        mask = bucket.mask(window, query.device)
        return attend(queries, keys, values, mask, scale, dropout, key_rows)

    return attend_buckets(query, key, value, segments, attend_bucket)


BucketAttention = Callable[[Bucket, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend_buckets(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, attend_bucket: BucketAttention
) -> Tensor:
    """Compute attention within packed sequences, float ``[R, heads, D]``, bucket by bucket.

    ``attend_bucket`` maps a bucket, its queries [n, heads, S, D], keys, values and ``key_rows`` to
    the bucket's attention, with the shapes of `attend`.
    """
    slots = [bucket.sequences * bucket.queries for bucket in segments.buckets]
    parts = []
    for bucket, queries, keys, values, key_rows in zip(
        segments.buckets,
        segments.queries.to_slots(query).split(slots),
        *_keys_of_buckets(key, value, segments),
        strict=True,
    ):
        out = attend_bucket(bucket, by_sequence(queries, bucket.sequences), keys, values, key_rows)
        parts.append(out.transpose(1, 2).flatten(0, 1))

    def rows_of(*parts: Tensor) -> Tensor:
        return segments.queries.to_rows(torch.cat(parts))

    # The next linear saves the parts, which attention saves anyway, and not the rows.
    return Origin(rows_of, tuple(part.detach() for part in parts)).note(rows_of(*parts))


def _keys_of_buckets(
    key: Tensor, value: Tensor, segments: Segments
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Return keys, values and ``key_rows`` of every bucket, as arguments of `attend`."""
    slots = [bucket.sequences * bucket.keys for bucket in segments.buckets]
    to_slots: Callable[[Tensor], Tensor]
    if not isinstance(segments.keys, Tensor):
        to_slots = segments.keys.to_slots
    elif key.device.type == "cpu":
        # The copies of a prefix are made again in the backward pass, so that none is saved.
        key, value = _compact(key), _compact(value)
        return [key] * len(slots), [value] * len(slots), segments.keys.split(slots)
    else:
        to_slots = partial(take_rows, rows=segments.keys)
    keys, values = (
        [
            by_sequence(part, bucket.sequences)
            for part, bucket in zip(to_slots(rows).split(slots), segments.buckets, strict=True)
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
    key_rows: Tensor | None = None,
) -> Tensor:
    """Compute attention, float ``[B, heads, S, D]``, the shape of ``query``.

    ``key``, ``value``: float ``[B, groups, S, D]``, or rows ``[R, groups, D]`` if ``key_rows`` is
    given. ``mask``: bool, true if the query attends to the key. None means causal attention.
    ``scale``: factor of the scores. ``key_rows``: int64 ``[B * S]``, the row of each key.
    """
    if query.device.type == "cpu" and dropout == 0.0 and torch.is_grad_enabled():
        return _CPUFlashAttention.apply(query, key, value, key_rows, mask, scale)
    if key_rows is not None:
        key = by_sequence(take_rows(key, key_rows), query.shape[0])
        value = by_sequence(take_rows(value, key_rows), query.shape[0])
    groups = query.shape[1] // key.shape[1]
    flash = mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and query.is_cuda and not flash:
        # Of the memory-efficient kernels only flash attention supports grouped queries. Without it
        # PyTorch would choose a kernel that materialises all scores, [heads, S, S].
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
    """`scaled_dot_product_attention` on CPU that saves grouped keys and repeated rows once."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_rows: Tensor | None,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            _for_heads(key, key_rows, query),
            _for_heads(value, key_rows, query),
            0.0,
            mask is None,
            attn_mask=_bias(mask, query.dtype),
            scale=scale,
        )
        ctx.save_for_backward(*map(_compact, (query, key, value)), key_rows, mask, out, sums)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_rows, mask, out, sums = ctx.saved_tensors
        by_query, by_key, by_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                query,
                _for_heads(key, key_rows, query),
                _for_heads(value, key_rows, query),
                out,
                sums,
                0.0,
                mask is None,
                attn_mask=_bias(mask, query.dtype),
                scale=ctx.scale,
            )
        )
        # Sum the gradients of repeated keys and values: over query heads, then over uses of a row.
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            by_key = by_key.unflatten(1, (-1, groups)).sum(2)
            by_value = by_value.unflatten(1, (-1, groups)).sum(2)
        if key_rows is not None:
            by_key, by_value = (
                add_rows(grad.transpose(1, 2).flatten(0, 1), key_rows, key.shape[0])
                for grad in (by_key, by_value)
            )
        return by_query, by_key, by_value, None, None, None


def _for_heads(keys: Tensor, key_rows: Tensor | None, query: Tensor) -> Tensor:
    """Return keys or values of every query head, ``[B, heads, S, D]``. Arguments as in `attend`."""
    if key_rows is not None:
        keys = by_sequence(keys.index_select(0, key_rows), query.shape[0])
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)


def _compact(tensor: Tensor) -> Tensor:
    """Return ``tensor``, copied if it is a view of more memory than its own elements."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 where bool ``mask`` is true and -inf elsewhere. Without a mask return None."""
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _join_heads(out: Tensor) -> Tensor:
    """Reshape ``[B, heads, S, D]`` to ``[S, B, heads * D]``."""
    return out.permute(2, 0, 1, 3).flatten(2)


def by_sequence(slots: Tensor, sequences: int) -> Tensor:
    """Reshape float ``[sequences * L, heads, D]`` to ``[sequences, heads, L, D]``."""
    return slots.unflatten(0, (sequences, -1)).transpose(1, 2)
