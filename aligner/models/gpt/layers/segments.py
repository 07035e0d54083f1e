"""Attention of the rows of a packed pass: the sequences that stand one after the other.

Attention must not cost the square of the packed row. The sequences are therefore taken apart into
buckets of similar length, each of which is a small right-padded batch:

    rows [R, heads, D] ─index─► slots [M, heads, D] ─split─► bucket [n, L, heads, D] ─► SDPA
    rows [R, heads, D] ◄─inverse index────────────────────── cat ◄─┘

Under context parallelism the queries are this rank's part of every sequence and the keys come from
all ranks.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.collectives import gather_first
from aligner.distributed.context_parallel import IntArray, holder, local_position

SHORT = 32  # sequences up to here share a bucket
GROWTH = 1.25  # the longest of a bucket may be this many times its shortest


@dataclass(frozen=True)
class SlotMap:
    """A partial one-to-one map between rows ``[R]`` and slots ``[M]``, as indices both ways.

    ``blank_slots`` have no row and ``blank_rows`` no slot; they become 0.
    """

    rows: Tensor  # int64 [M]: row of each slot
    blank_slots: Tensor
    slots: Tensor  # int64 [R]: slot of each row
    blank_rows: Tensor

    @classmethod
    def of(cls, row_of_slot: IntArray, num_rows: int, device: torch.device) -> "SlotMap":
        """Build from the row of each slot, -1 where there is none."""
        filled = np.flatnonzero(row_of_slot >= 0)
        slot_of_row = np.full(num_rows, -1)
        slot_of_row[row_of_slot[filled]] = filled

        def indices(values: IntArray) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        return cls(
            rows=indices(row_of_slot.clip(0)),
            blank_slots=indices(np.flatnonzero(row_of_slot < 0)),
            slots=indices(slot_of_row.clip(0)),
            blank_rows=indices(np.flatnonzero(slot_of_row < 0)),
        )

    def to_slots(self, rows: Tensor) -> Tensor:
        """``[R, ...]`` to ``[M, ...]``, of any dtype."""
        return _Move.apply(rows, self.rows, self.blank_slots, self.slots, self.blank_rows)

    def to_rows(self, slots: Tensor) -> Tensor:
        """``[M, ...]`` to ``[R, ...]``, of any dtype."""
        return _Move.apply(slots, self.slots, self.blank_rows, self.rows, self.blank_slots)


class _Move(torch.autograd.Function):
    """Gather by an index whose inverse is known: backward gathers too, instead of adding up."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, index: Tensor, blank: Tensor, inverse: Tensor, missing: Tensor
    ) -> Tensor:
        ctx.inverse, ctx.missing = inverse, missing
        return _take(source, index, blank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _take(gradients[0], ctx.inverse, ctx.missing), None, None, None, None


def _take(source: Tensor, index: Tensor, blank: Tensor) -> Tensor:
    taken = source.index_select(0, index)
    return taken.index_fill_(0, blank, 0.0) if blank.numel() else taken


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length.

    ``positions``: int64 ``[sequences, queries]``, where each query stands among its keys; None
    where query i stands at key i.
    """

    sequences: int
    queries: int
    keys: int
    positions: Tensor | None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Bool ``[sequences or 1, 1, queries, keys]``, true where seen; None: plainly causal.

        Every layer of a pass asks for the same one.
        """
        windowed = window is not None and window < self.keys
        if self.positions is None and not windowed:
            return None
        if window not in self._masks:
            queries = self.positions
            if queries is None:
                queries = torch.arange(self.queries, device=device)[None]
            distance = queries[:, None, :, None] - torch.arange(self.keys, device=device)
            seen = distance >= 0
            self._masks[window] = seen & (distance < window) if windowed else seen
        return self._masks[window]


@dataclass(frozen=True)
class Runs:
    """The same as runs of queries and of the keys they see, each pair aligned at its end.

    Query i of q sees the first ``k - q + i + 1`` of its k keys. A sequence is one pair; under
    context parallelism it is two, one for each chunk that this rank holds.
    """

    queries: IntArray  # [m] lengths; the queries are the local rows in order
    keys: IntArray  # [m] lengths
    key_rows: Tensor | None  # int64 [k], rows of the keys among those of all ranks; None: in order
    query_ends: Tensor  # int32 [m + 1], where each run begins, and where the last one ends
    key_ends: Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The sequences of one packed pass, on this rank."""

    num_rows: int
    lengths: IntArray  # [n] padded tokens of each sequence, over all ranks
    starts: IntArray  # [n] first local row of each sequence
    buckets: tuple[Bucket, ...]
    queries: SlotMap
    keys: SlotMap
    cp_rank: int = 0
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Float keys and values ``[R, groups, D]`` of all context-parallel ranks, in rank order."""
        if self.cp_group is None:
            return key, value
        both = gather_first(torch.cat((key, value), dim=-1), self.cp_group)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    @cached_property
    def runs(self) -> Runs:
        """Runs for kernels of variable-length attention."""
        device, size, rank = self.queries.rows.device, self.cp_size, self.cp_rank
        if size == 1:
            ends = _ends(self.lengths, device)
            return Runs(self.lengths, self.lengths, None, ends, ends)
        chunk = self.lengths // (2 * size)
        queries = chunk.repeat(2)
        keys = np.stack([(rank + 1) * chunk, (2 * size - rank) * chunk], axis=1).ravel()
        position = np.arange(keys.sum()) - (np.cumsum(keys) - keys).repeat(keys)
        owner, offset = holder(position, queries.repeat(keys), size)
        rows = owner * self.num_rows + self.starts.repeat(2).repeat(keys) + offset
        return Runs(
            queries,
            keys,
            torch.from_numpy(rows).to(device, non_blocking=True),
            _ends(queries, device),
            _ends(keys, device),
        )


def build_segments(
    lengths: IntArray,
    num_rows: int,
    device: torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_group: dist.ProcessGroup | None = None,
) -> Segments:
    """Plan the attention of sequences that stand one after the other.

    Args:
        lengths: padded tokens of each sequence, multiples of ``2 * cp_size`` when that is over 1.
        num_rows: rows on this rank, at least ``lengths.sum() / cp_size``.
        device: where the indices go.
        cp_rank: this rank among those that share every sequence.
        cp_size: their number.
        cp_group: their group.
    """
    local = lengths // cp_size
    starts = np.cumsum(local) - local
    buckets, query_rows, key_rows = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for members in _by_length(lengths):
        start, count = starts[members, None], local[members, None]
        offset = np.arange(count.max())[None]
        query_rows.append(np.where(offset < count, start + offset, -1).ravel())
        if cp_size == 1:
            buckets.append(Bucket(len(members), offset.size, offset.size, None))
            continue
        chunk = count // 2
        place = np.where(offset < count, local_position(offset, chunk, cp_rank, cp_size), 0)
        seen = (2 * cp_size - cp_rank) * chunk  # tokens up to the end of this rank's late chunk
        position = np.arange(seen.max())[None]
        rank, at = holder(np.minimum(position, seen - 1), chunk, cp_size)
        key_rows.append(np.where(position < seen, rank * num_rows + start + at, -1).ravel())
        positions = torch.from_numpy(place).to(device, non_blocking=True)
        buckets.append(Bucket(len(members), offset.size, position.size, positions))
    queries = SlotMap.of(np.concatenate(query_rows), num_rows, device)
    keys = queries
    if cp_size > 1:
        keys = SlotMap.of(np.concatenate(key_rows), num_rows * cp_size, device)
    return Segments(
        num_rows, lengths, starts, tuple(buckets), queries, keys, cp_rank, cp_size, cp_group
    )


def _by_length(lengths: IntArray) -> list[IntArray]:
    """Indices of the sequences of each bucket; sequences without tokens are in none."""
    level = np.ceil(np.log(np.maximum(lengths, SHORT) / SHORT) / np.log(GROWTH))
    level[lengths == 0] = -1
    return [np.flatnonzero(level == number) for number in np.unique(level) if number >= 0]


def _ends(lengths: IntArray, device: torch.device) -> Tensor:
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(ends).to(device, non_blocking=True)
