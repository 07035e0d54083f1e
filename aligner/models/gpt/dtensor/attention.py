"""Attention of transformers' models on aligner's own kernels, for padded and packed passes.

transformers calls what `register` leaves under `NAME` for every layer, with heads that are this
rank's. Sequences are right-padded or packed by `Segments`, so no mask is ever built.
"""

import functools
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aligner.models.gpt.layers.attention import attend_rows, attend_segments
from aligner.models.gpt.layers.segments import Segments

NAME = "aligner"
RECOMPUTED = "aligner_recomputed"  # the same; probabilities are computed again in backward


def register() -> None:
    """Make both known to transformers."""
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
    """transformers' attention function.

    Args:
        module: the layer's attention.
        query: float ``[B, heads, S, D]``, rotated; keys and values may have fewer heads.
        key: as ``query``.
        value: as ``query``.
        attention_mask: must be None.
        scaling: of the scores; default ``D ** -0.5``.
        dropout: of the probabilities.
        segments: the sequences that stand in the ``S`` rows (``B`` is 1); None: each row is one.
        sliding_window: positions that are seen, the own one included.
        unused: what other implementations need (position ids, cache settings).

    Returns:
        ``[B, S, heads, D]``, and no probabilities.
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
    """As `attention`, keeping only queries, keys and values for backward."""
    if not module.training:
        return attention(module, query, key, value, attention_mask, **kwargs)
    call = functools.partial(attention, **kwargs)
    return checkpoint(call, module, query, key, value, attention_mask, use_reentrant=False)
