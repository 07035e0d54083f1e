"""Attention of transformers' models by aligner's kernels, for padded and packed passes.

transformers calls the function that `register` registers as `NAME` for every layer, with this
rank's heads. Sequences are right-padded or packed by `Segments`, so that no mask is built.
"""

import functools
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aligner.models.gpt.layers.attention import attend_rows, attend_segments
from aligner.models.gpt.layers.segments import Segments

NAME = "aligner"
RECOMPUTED = "aligner_recomputed"  # recomputes the probabilities in backward


def register() -> None:
    """Register both functions with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(RECOMPUTED, recomputed_attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers requires.

    Args:
        module: the layer's attention.
        query: float ``[B, heads, S, D]``, rotary embedding applied.
        key: float ``[B, groups, S, D]``, rotary embedding applied.
        value: float ``[B, groups, S, D]``.
        attention_mask: must be None.
        scaling: factor of the scores. Default: ``D ** -0.5``.
        dropout: dropout of the probabilities.
        segments: the sequences in the ``S`` packed rows (``B`` is 1), or None for one per row.
        sliding_window: positions that a query attends to, including its own.
        unused: arguments of other implementations (position ids, cache settings).

    Returns:
        ``[B, S, heads, D]``, and None for the probabilities.
    """
    del module, unused
    assert attention_mask is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if segments is None:
        rows = attend_rows(query, key, value, sliding_window, scale=scale, dropout=dropout)
        return rows.transpose(1, 2), None
    assert query.shape[0] == 1
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    packed = attend_segments(
        query, key, value, segments, sliding_window, scale=scale, dropout=dropout
    )
    return packed[None], None


def recomputed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute `attention` ``[B, S, heads, D]``, saving only queries, keys and values."""
    if not module.training:
        return attention(module, query, key, value, attention_mask, **kwargs)
    call = functools.partial(attention, **kwargs)
    return checkpoint(call, module, query, key, value, attention_mask, use_reentrant=False)
