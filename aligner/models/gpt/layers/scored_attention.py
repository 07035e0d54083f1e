"""Attention by PyTorch operations, for soft caps and sinks, which fused kernels lack."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from aligner.models.gpt.layers.attention import CoreAttention, attend_buckets
from aligner.models.gpt.layers.dot_product import by_sequence
from aligner.models.gpt.layers.fusions import GPTConfig
from aligner.models.gpt.layers.segments import Bucket, Segments, take_rows


def attend_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    dropout: float = 0.0,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
    key_rows: Tensor | None = None,
) -> Tensor:
    """Compute attention ``[n, heads, S, E]`` with a float32 softmax.

    Args:
        query: float ``[n, heads, S, D]``.
        key: float ``[n, groups, K, D]``, or with ``key_rows`` distinct tokens ``[R, groups, D]``.
        value: float ``[n, groups, K, E]``, or with ``key_rows`` ``[R, groups, E]``.
        seen: bool ``[n or 1, 1, S, K]``, true if the query attends to the key. The result of a
            query without keys (padding) is the mean of the values.
        scale: factor of the scores.
        dropout: share of the probabilities that are set to 0.
        cap: soft cap ``c``. A score ``s`` becomes ``c * tanh(s / c)``. None or 0: no cap.
        sinks: float ``[heads]``, score of a key without a value to which every query attends.
        key_rows: int64 ``[n * K]``, row of each key.
    """
    if key_rows is not None:
        key = by_sequence(take_rows(key, key_rows), query.shape[0])
        value = by_sequence(take_rows(value, key_rows), query.shape[0])
    # Queries of the R heads of a group are rows of one product. Scores: [n, groups, R, S, K].
    rows, heads, length, _ = query.shape
    groups, keys = key.shape[1:3]
    by_group = query.reshape(rows, groups, -1, query.shape[3])
    scores = (by_group @ key.transpose(-1, -2) * scale).view(rows, groups, -1, length, keys)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, :, None], torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, groups, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, sink], -1)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)[..., :keys]
    attended = F.dropout(probabilities, dropout).flatten(2, 3) @ value
    return attended.view(rows, heads, length, -1)


class ScoredAttention(CoreAttention):
    """`CoreAttention` with a soft cap of the scores (``config.attention_cap``) and with sinks.

    ``softmax_offset``: float ``[heads]``, scores of the sinks, or None.
    """

    def __init__(self, config: GPTConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def attend_rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `CoreAttention.attend_rows`."""
        rows, _, length, _ = query.shape
        return self.attend_bucket(Bucket(rows, length, length, None), query, key, value)

    def attend_segments(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments
    ) -> Tensor:
        """See `CoreAttention.attend_segments`."""
        keys, values = segments.gather_keys(key, value)
        return attend_buckets(query, keys, values, segments, self.attend_bucket)

    def attend_bucket(
        self,
        bucket: Bucket,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_rows: Tensor | None = None,
    ) -> Tensor:
        """Compute a bucket's attention, float ``[n, heads, S, D]``. See `attend_buckets`."""
        seen = bucket.mask(self.window, query.device)
        if seen is None:
            seen = query.new_ones(1, 1, bucket.queries, bucket.keys, dtype=torch.bool).tril()
        return self.attend(query, key, value, seen, key_rows)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor,
        key_rows: Tensor | None = None,
    ) -> Tensor:
        """Compute `attend_scores`, float ``[n, heads, S, D]``, with this layer's settings."""
        dropout = self.dropout if self.training else 0.0
        return attend_scores(
            *(query, key, value, seen, self.scale, dropout),
            cap=self.config.attention_cap,
            sinks=self.softmax_offset,
            key_rows=key_rows,
        )
