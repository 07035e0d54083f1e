"""`scaled_dot_product_attention` with grouped queries, sliding windows and shared key rows."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.models.gpt.layers.segments import add_rows, take_rows


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute causal attention, float ``[B, heads, S, D]``. For the arguments see `attend`.

    ``window``: number of positions that a query attends to, including its own. None: all.
    """
    mask, length = None, query.shape[2]
    if window is not None and length > window:
        position = torch.arange(length, device=query.device)
        first = position[:, None] - window + 1
        mask = (position <= position[:, None]) & (position >= first)
    return attend(query, key, value, mask, scale, dropout)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    key_rows: Tensor | None = None,
) -> Tensor:
    """Compute attention. ``query`` and the result: float ``[B, heads, S, D]``.

    ``key``, ``value``: float ``[B, kv_heads, S, D]``, or with ``key_rows`` one row for each token
    that several sequences share, ``[R, kv_heads, D]``. ``key_rows``: int64 ``[B * S]``, row index
    for each position of each sequence. ``mask``: bool, true if the query attends to the key. None
    means causal attention. ``scale``: factor of the scores.
    """
    if query.device.type == "cpu" and dropout == 0.0 and torch.is_grad_enabled():
        return _CPUFlashAttention.apply(query, key, value, key_rows, mask, scale)
    if key_rows is not None:
        key = by_sequence(take_rows(key, key_rows), query.shape[0])
        value = by_sequence(take_rows(value, key_rows), query.shape[0])
    queries_per_key = query.shape[1] // key.shape[1]
    flash = mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if queries_per_key > 1 and query.is_cuda and not flash:
        # Only flash attention supports grouped queries without storing all scores, [heads, S, S].
        key = key.repeat_interleave(queries_per_key, 1)
        value = value.repeat_interleave(queries_per_key, 1)
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
    """Attention on a CPU that saves each key and value once for backward, not once per query."""

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
        ctx.save_for_backward(*map(compact, (query, key, value)), key_rows, mask, out, sums)
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
    """Repeat keys or values for every query head, ``[B, heads, S, D]``. See `attend`."""
    if key_rows is not None:
        keys = by_sequence(keys.index_select(0, key_rows), query.shape[0])
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)


def compact(tensor: Tensor) -> Tensor:
    """Return ``tensor`` [...], or a copy if the tensor is a view of a larger storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 where bool ``mask`` is true and -inf elsewhere. Without a mask return None."""
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def by_sequence(slots: Tensor, sequences: int) -> Tensor:
    """Reshape float ``[sequences * L, heads, D]`` to ``[sequences, heads, L, D]``."""
    return slots.unflatten(0, (sequences, -1)).transpose(1, 2)
