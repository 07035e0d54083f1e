"""Packed attention by the variable-length kernel of a GPU, where PyTorch has it."""

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.gpt.segments import Segments


@functools.cache
def _has_kernel() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def can_attend_varlen(query: Tensor, dropout: float) -> bool:
    """Whether the kernel takes these queries ``[R, heads, D]``."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and dropout == 0.0
        and _has_kernel()
    )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend within every sequence.

    Args:
        query: ``[R, heads, D]``, this rank's rows.
        key: ``[cp_size * R, groups, D]``, rows of all context-parallel ranks.
        value: as ``key``.
        segments: where the sequences are.
        scale: of the scores.
        window: sliding window; None: none.

    Returns:
        ``[R, heads, D]``, 0 where a row belongs to no sequence.
    """
    from torch.nn.attention.varlen import varlen_attn

    runs = segments.runs
    used = int(runs.queries.sum())
    if runs.key_rows is None:
        key, value = key[:used], value[:used]
    else:
        key, value = key.index_select(0, runs.key_rows), value.index_select(0, runs.key_rows)
    out = varlen_attn(
        query[:used].contiguous(),
        key.contiguous(),
        value.contiguous(),
        runs.query_ends,
        runs.key_ends,
        int(runs.queries.max()),
        int(runs.keys.max()),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(out, Tensor)
    return F.pad(out, (0, 0, 0, 0, 0, query.shape[0] - used))
