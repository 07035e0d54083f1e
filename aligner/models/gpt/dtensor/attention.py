"""Aligner's attention as an attention function of transformers, for padded and packed rows.

Once for each kind of attention layer, transformers calls `mask`. This function returns a `Rule`
instead of a mask tensor. Every layer passes its rule to `attention`, with the heads of this rank.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aligner.errors import LayoutError
from aligner.models.gpt.layers.attention import attend_buckets, attend_segments
from aligner.models.gpt.layers.dot_product import attend_rows
from aligner.models.gpt.layers.scored_attention import attend_scores
from aligner.models.gpt.layers.segments import Bucket, Segments

NAME = "aligner"
RECOMPUTED = "aligner_recomputed"  # recomputes the probabilities in backward
# Keywords of layers that repeat what the rule contains, or that change no output.
_REPEATED = {
    *("position_ids", "sliding_window", "use_cache", "output_router_logits", "output_attentions"),
    "is_causal",
}


@dataclass
class Pass:
    """State of one forward pass.

    ``segments``: sequences of a packed row, None for padded rows. ``calls``: number of finished
    calls of `attention`. ``store``: in decoding, adds keys and values of a call, float
    ``[B, groups, S, D]``, to a cache. Returns the keys and values to attend to, and the `Bucket`
    with the positions of the queries, None if query i has position i.
    """

    segments: Segments | None
    calls: int = 0
    store: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Bucket | None]] | None = None


_PASS: ContextVar[Pass | None] = ContextVar("pass", default=None)


@contextlib.contextmanager
def running(segments: Segments | None) -> Iterator[Pass]:
    """Make ``segments`` the packed sequences of all models that run inside the block."""
    current = Pass(segments)
    token = _PASS.set(current)
    try:
        yield current
    finally:
        _PASS.reset(token)


@dataclass(frozen=True, eq=False)
class Rule:
    """Which keys a query attends to, in all attention layers of one kind.

    ``function``: transformers' mask function. Its arguments are batch index, head, position of the
    query and position of the key, int64 [...], and broadcast. Returns bool [...], true if the query
    attends to the key. ``is_plain``: true if each query attends exactly to the last ``window``
    positions up to its own (None: to all).
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    is_plain: bool
    window: int | None
    current: Pass
    _masks: dict[Hashable, Tensor] = field(default_factory=dict)

    def mask(self, bucket: Bucket, device: torch.device) -> Tensor:
        """Return the mask of ``bucket``, bool ``[sequences or 1, 1, queries, keys]`` (cached)."""
        kind = bucket.queries, bucket.keys, bucket.positions is not None and id(bucket)
        if kind not in self._masks:
            queries = bucket.positions
            if queries is None:
                queries = torch.arange(bucket.queries, device=device)[None]
            queries = queries[:, None, :, None]
            keys = torch.arange(bucket.keys, device=device).view(1, 1, 1, -1)
            zero = torch.zeros_like(keys[..., :1])
            seen = self.function(zero, zero, queries, keys) & (keys <= queries)
            self._masks[kind] = seen.expand(-1, -1, bucket.queries, bucket.keys)
        return self._masks[kind]


def register() -> None:
    """Register the attention and mask functions of this module with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in ((NAME, attention), (RECOMPUTED, recomputed_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Any,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **unused: Any,
) -> Rule:
    """Return the attention rule of one kind of layer. transformers requires this signature.

    ``mask_function``: see `Rule`. ``local_size``: number of positions in a sliding window or chunk.
    ``use_vmap``: whether the model adds a mask condition. ``unused``: arguments that only mask
    tensors and caches need.
    """
    from transformers.masking_utils import causal_mask_function

    del batch_size, q_length, kv_length, unused
    current = _PASS.get()
    assert current is not None, "a model with aligner's attention must run inside of `running`"
    is_window = (
        local_size is not None
        and not use_vmap
        and local_size == getattr(config, "sliding_window", None)
        and getattr(config, "attention_chunk_size", None) is None
    )
    is_plain = is_window or mask_function is causal_mask_function
    return Rule(mask_function, is_plain, local_size if is_window else None, current)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rule,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute attention, float ``[B, S, heads, E]``. transformers requires this signature.

    Args:
        module: attention module of the layer, only for messages.
        query: float ``[B, heads, S, D]``, rotary embedding applied.
        key: float ``[B, groups, S, D]``, rotary embedding applied.
        value: float ``[B, groups, S, E]``.
        attention_mask: rule that `mask` returned. In a packed pass ``B`` is 1.
        scaling: factor of the scores. Default: ``D ** -0.5``.
        softcap: soft limit ``c`` of the scores. A score ``s`` becomes ``c * tanh(s / c)``. None or
            0: no limit.
        s_aux: float ``[heads]``, score of an attention sink: a key without a value to which every
            query attends.

    Raises:
        LayoutError: the layer passes a mask tensor or an unsupported keyword.
    """
    unknown = {name for name, value in keywords.items() if value is not None} - _REPEATED
    if unknown or not isinstance(attention_mask, Rule):
        passed = ", ".join(sorted(unknown)) or "a mask tensor"
        raise LayoutError(
            f"{type(module).__name__} passes {passed} to its attention function, which aligner's "
            "attention does not support"
        )
    rule, segments = attention_mask, attention_mask.current.segments
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bucket = None
    if rule.current.store is not None:
        key, value, bucket = rule.current.store(rule.current.calls, key, value)
    rule.current.calls += 1
    is_plain = rule.is_plain and not softcap and s_aux is None and bucket is None
    is_plain = is_plain and query.shape[-1] == value.shape[-1]

    # For a rule that is not plain, the scores of one bucket are in memory at a time.
    def attend_bucket(
        bucket: Bucket, queries: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor | None
    ) -> Tensor:
        seen = rule.mask(bucket, queries.device)
        options = {"cap": softcap, "sinks": s_aux, "key_rows": key_rows}
        return attend_scores(queries, keys, values, seen, scale, dropout, **options)

    if segments is None:
        if is_plain:
            out = attend_rows(query, key, value, rule.window, scale=scale, dropout=dropout)
        else:
            rows, _, length, _ = query.shape
            bucket = bucket or Bucket(rows, length, length, None)
            out = attend_bucket(bucket, query, key, value, None)
        return out.transpose(1, 2).contiguous(), None
    assert query.shape[0] == 1
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    if is_plain:
        window = rule.window
        out = attend_segments(query, key, value, segments, window, scale=scale, dropout=dropout)
    else:
        out = attend_buckets(query, key, value, segments, attend_bucket)
    return out[None], None


def recomputed_attention(module: nn.Module, *inputs: Any, **keywords: Any) -> tuple[Tensor, None]:
    """Compute `attention` ``[B, S, heads, E]``, and recompute its intermediates in backward."""
    if not module.training:
        return attention(module, *inputs, **keywords)
    call = functools.partial(attention, **keywords)
    return checkpoint(call, module, *inputs, use_reentrant=False)
