"""`CoreAttention`: attention of megatron-core's layers by PyTorch's fused kernels.

Generation attaches a key-value cache to the module. In packed and context-parallel passes,
`Segments` describe which tokens attend to each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from aligner.kernels.linear_product import Origin
from aligner.models.gpt.layers.dot_product import attend, attend_rows, by_sequence, compact
from aligner.models.gpt.layers.segments import Bucket, Segments, take_rows
from aligner.models.gpt.layers.varlen import attend_varlen, can_attend_varlen

# Function that stores keys and values of a layer and computes attention over all stored keys, float
# ``[S, B, heads * D]``. Arguments: layer number; query, key and value of `CoreAttention.forward`.
CachedAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class SegmentParams(PackedSeqParams):
    """Argument by which megatron-core's layers pass `Segments` to `CoreAttention`.

    The segments are an argument, because recomputation calls the attention again in the backward
    pass. ``qkv_format`` is ``sbhd``, so that the layers treat the packed row as one sequence.
    """

    qkv_format: str = "sbhd"
    segments: Segments | None = None


class CoreAttention(MegatronModule):
    """Causal grouped-query attention, optionally with a sliding window.

    Sequences are right-padded. Valid positions therefore never attend to padding, without a mask.
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
        self.cached: CachedAttention | None = None  # set during generation

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
        if packed_seq_params is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out = self.attend_rows(query, key, value)
            return Origin(_join_heads, (out.detach(),)).note(_join_heads(out))
        # Packed: one long row. The output keeps the origin that `attend_buckets` noted.
        assert query.shape[1] == 1
        segments = packed_seq_params.segments
        assert segments is not None
        rows = self.attend_segments(query[:, 0], key[:, 0], value[:, 0], segments)
        joined = rows.reshape(len(rows), 1, -1)
        origin = Origin.of(rows)
        return joined if origin is None else origin.note(joined)

    @property
    def _options(self) -> dict[str, float]:
        return {"scale": self.scale, "dropout": self.dropout if self.training else 0.0}

    def attend_rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention of one sequence per row, float ``[B, heads, S, D]`` (see `attend`)."""
        return attend_rows(query, key, value, self.window, **self._options)

    def attend_segments(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments
    ) -> Tensor:
        """Compute `attend_segments`, float ``[R, heads, D]``, with this layer's settings."""
        return attend_segments(query, key, value, segments, self.window, **self._options)


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
    """Compute attention within each packed sequence, float ``[R, heads, D]``, 0 in padding."""
    key, value = segments.gather_keys(key, value)
    if segments.buckets and can_attend_varlen(query, dropout, window):
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
    """Compute attention within each packed sequence. Returns float ``[R, heads, D]`` for R tokens.

    Sequences of similar lengths are a bucket. ``attend_bucket(bucket, queries, keys, values,
    key_rows)`` computes a bucket's attention. For shapes and ``key_rows`` see `attend`.
    """
    # Without sequences the gradients are zeros, not None: other ranks may wait for them.
    if not segments.buckets:
        zero = (query.sum() + key.sum() + value.sum()) * 0.0
        return zero.expand(*query.shape[:2], value.shape[-1])
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

    # For backward, the next linear layer saves the parts, which attention saves anyway.
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
        # Copies of a shared prefix are not saved. The backward pass makes them again.
        key, value = compact(key), compact(value)
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


def _join_heads(out: Tensor) -> Tensor:
    return out.permute(2, 0, 1, 3).flatten(2)
