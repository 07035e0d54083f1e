"""Plan of attention over packed sequences: which tokens attend to each other.

A packed row contains the tokens of one sequence after another. Sequences of similar length form a
bucket, so that the cost does not grow with the square of the row's length. A bucket is a small
right-padded batch:

    rows [R, heads, D] ─index─► slots [M, heads, D] ─split─► bucket [n, L, heads, D] ─► SDPA
    rows [R, heads, D] ◄─inverse index────────────────────── cat ◄─┘

Under context parallelism, keys are gathered from all ranks. If sequences share prefixes, a segment
is a run of tokens, which also attends to the runs of its prefix.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.parallel.collectives import gather_first
from aligner.parallel.context import IntArray, holder, local_position

SHORT = 32  # sequences with at most this number of tokens share a bucket
GROWTH = 1.25  # maximum ratio of the longest to the shortest sequence in a bucket


@dataclass(frozen=True)
class SlotMap:
    """Partial one-to-one map between rows ``[R]`` and slots ``[M]``, as indices in both directions.

    ``blank_slots`` have no row and ``blank_rows`` have no slot. They are filled with 0.
    """

    rows: Tensor  # int64 [M]: row of each slot
    blank_slots: Tensor
    slots: Tensor  # int64 [R]: slot of each row
    blank_rows: Tensor

    @classmethod
    def of(cls, row_of_slot: IntArray, num_rows: int, device: torch.device) -> "SlotMap":
        """Build the map from the row of each slot, -1 for a blank slot."""
        filled = np.flatnonzero(row_of_slot >= 0)
        slot_of_row = np.full(num_rows, -1)
        slot_of_row[row_of_slot[filled]] = filled
        return cls(
            rows=_to_device(row_of_slot.clip(0), device),
            blank_slots=_to_device(np.flatnonzero(row_of_slot < 0), device),
            slots=_to_device(slot_of_row.clip(0), device),
            blank_rows=_to_device(np.flatnonzero(slot_of_row < 0), device),
        )

    def to_slots(self, rows: Tensor) -> Tensor:
        """Map rows ``[R, ...]`` of any dtype to slots ``[M, ...]``."""
        return _Permute.apply(rows, self.rows, self.blank_slots, self.slots, self.blank_rows)

    def to_rows(self, slots: Tensor) -> Tensor:
        """Map slots ``[M, ...]`` of any dtype to rows ``[R, ...]``."""
        return _Permute.apply(slots, self.slots, self.blank_rows, self.rows, self.blank_slots)


class _Permute(torch.autograd.Function):
    """Gather by an index whose inverse is known. Backward therefore gathers, too."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, index: Tensor, blank: Tensor, inverse: Tensor, missing: Tensor
    ) -> Tensor:
        ctx.inverse, ctx.missing = inverse, missing
        return _gather(source, index, blank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(gradients[0], ctx.inverse, ctx.missing), None, None, None, None


def _gather(source: Tensor, index: Tensor, blank: Tensor) -> Tensor:
    gathered = source.index_select(0, index)
    return gathered.index_fill_(0, blank, 0.0) if blank.numel() else gathered


def take_rows(source: Tensor, rows: Tensor) -> Tensor:
    """Select ``rows``, int64 ``[N]`` with repeats, of float ``[R, ...]``. Returns ``[N, ...]``.

    The gradient of a repeated row is summed in float32 or wider, on a CPU in the order of ``rows``.
    """
    return _TakeRows.apply(source, rows)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.num_rows = rows, source.shape[0]
        return source.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return add_rows(gradients[0], ctx.rows, ctx.num_rows), None


def add_rows(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Sum float ``values`` ``[N, ...]`` by row index, int64 ``[N]``, into ``[num_rows, ...]``."""
    wide = torch.promote_types(values.dtype, torch.float32)
    total = values.new_zeros((num_rows, *values.shape[1:]), dtype=wide)
    return total.index_add_(0, rows, values.to(wide)).to(values.dtype)


@dataclass(frozen=True)
class Bucket:
    """A padded batch of sequences of similar length, with its numbers of queries and keys.

    ``positions``: int64 ``[sequences, queries]``, index of the key at each query's position. None:
    query i is at key i.
    """

    sequences: int
    queries: int
    keys: int
    positions: Tensor | None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return the attention mask, the same tensor for all layers with this ``window``.

        Bool ``[sequences or 1, 1, queries, keys]``, true if the query attends to the key. None
        means causal attention.
        """
        windowed = window is not None and window < self.keys
        if self.positions is None and not windowed:
            return None
        if window not in self._masks:
            queries = self.positions
            if queries is None:
                queries = torch.arange(self.queries, device=device)[None]
            distance = queries[:, None, :, None] - torch.arange(self.keys, device=device)
            visible = distance >= 0
            self._masks[window] = visible & (distance < window) if windowed else visible
        return self._masks[window]


@dataclass(frozen=True)
class Runs:
    """m pairs of a run of queries and a run of keys. A run is a number of contiguous tokens.

    The last query and key are the same token. Query i of q attends to the first ``k - q + i + 1``
    keys. A sequence is a pair, under context parallelism each of its two chunks on this rank.
    """

    queries: IntArray  # [m] lengths of the runs of queries, which follow each other on this rank
    keys: IntArray  # [m] lengths of the runs of keys
    key_rows: Tensor | None  # int64 [k], row of each key among all ranks' rows. None: in order
    query_ends: Tensor  # int32 [m + 1], start of each run, then the end of the last run
    key_ends: Tensor


@dataclass(frozen=True)
class KeyRows:
    """Row of each sequence's keys, among the rows of all context-parallel ranks.

    A sequence's keys are the tokens of its shared prefix, which are rows of other sequences, and
    then its own tokens.
    """

    lengths: IntArray  # [n] padded tokens of each sequence, over all ranks
    starts: IntArray  # [n] first row of each sequence, the same on every rank
    num_rows: int  # of a rank
    ranks: int
    prefix_lengths: IntArray  # [n] tokens
    prefix_starts: IntArray  # [n] start of each sequence's prefix in `prefix_rows`
    prefix_rows: IntArray  # [k] rows of one prefix after the other

    @classmethod
    def of(cls, lengths: IntArray, num_rows: int, ranks: int) -> "KeyRows":
        """Build the rows of packed sequences without shared prefixes."""
        local = lengths // ranks
        zeros = np.zeros_like(lengths)
        return cls(lengths, np.cumsum(local) - local, num_rows, ranks, zeros, zeros, zeros[:0])

    def with_prefixes(self, parents: IntArray, tokens: IntArray) -> "KeyRows":
        """Return a copy with prefixes. A prefix is the parent's prefix and the parent itself.

        ``parents``: ``[n]``, index of an earlier sequence, or -1. ``tokens``: ``[n]``, length of
        each sequence without padding.
        """
        prefixes = {-1: np.empty(0, np.int64)}  # by parent
        for parent in np.unique(parents[parents >= 0]).tolist():
            rows = self._rows(np.full(tokens[parent], parent), np.arange(tokens[parent]))
            prefixes[parent] = np.concatenate([prefixes[int(parents[parent])], rows])
        sizes = {parent: len(rows) for parent, rows in prefixes.items()}
        starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        return replace(
            self,
            prefix_lengths=np.array([sizes[parent] for parent in parents.tolist()], np.int64),
            prefix_starts=np.array([starts[parent] for parent in parents.tolist()], np.int64),
            prefix_rows=np.concatenate(list(prefixes.values())),
        )

    def at(self, sequences: IntArray, positions: IntArray) -> IntArray:
        """Return the rows of the keys at ``positions`` of ``sequences``. The shapes broadcast."""
        prefix_length = self.prefix_lengths[sequences]
        rows = self._rows(sequences, (positions - prefix_length).clip(0))
        if not len(self.prefix_rows):
            return rows
        index = (self.prefix_starts[sequences] + positions).clip(max=len(self.prefix_rows) - 1)
        return np.where(positions < prefix_length, self.prefix_rows[index], rows)

    def _rows(self, sequences: IntArray, offsets: IntArray) -> IntArray:
        """Return the row of each token. ``offsets``: positions counted from the prefix's end."""
        if self.ranks == 1:
            return self.starts[sequences] + offsets
        rank, offset = holder(offsets, self.lengths[sequences] // (2 * self.ranks), self.ranks)
        return rank * self.num_rows + self.starts[sequences] + offset


@dataclass(frozen=True, eq=False)
class Segments:
    """Packed sequences of a forward pass on this rank, and the plan of their attention."""

    key_rows: KeyRows
    buckets: tuple[Bucket, ...]
    queries: SlotMap
    keys: SlotMap | Tensor  # int64 [M], row of each slot, if a row is in several slots
    cp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None

    def gather_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather float keys and values ``[R, groups, D]`` of all cp ranks, in rank order."""
        if self.cp_group is None:
            return key, value
        both = gather_first(torch.cat((key, value), dim=-1), self.cp_group)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    @cached_property
    def runs(self) -> Runs:
        """`Runs` for kernels of variable-length attention."""
        rows, device = self.key_rows, self.queries.rows.device
        sequences, queries = np.arange(len(rows.lengths)), rows.lengths
        keys = queries  # without the prefixes
        if rows.ranks > 1:
            # Each rank has an early and a late chunk of every sequence.
            chunk = rows.lengths // (2 * rows.ranks)
            sequences, queries = sequences.repeat(2), chunk.repeat(2)
            chunks = np.array([self.cp_rank + 1, 2 * rows.ranks - self.cp_rank])
            keys = (chunk[:, None] * chunks).ravel()
        elif not len(rows.prefix_rows):
            # Queries and keys are the same rows.
            ends = _ends(queries, device)
            return Runs(queries, queries, None, ends, ends)
        # Gather the rows of every run of keys, prefix first.
        keys = rows.prefix_lengths[sequences] + keys
        position = np.arange(keys.sum()) - (np.cumsum(keys) - keys).repeat(keys)
        key_rows = rows.at(sequences.repeat(keys), position)
        ends = _ends(queries, device), _ends(keys, device)
        return Runs(queries, keys, _to_device(key_rows, device), *ends)


def build_segments(
    lengths: IntArray,
    num_rows: int,
    device: torch.device,
    *,
    parents: IntArray | None = None,
    tokens: IntArray | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_group: dist.ProcessGroup | None = None,
) -> Segments:
    """Plan the attention of sequences that are packed one after the other.

    ``lengths``: padded length of each sequence, a multiple of ``2 * cp_size`` if ``cp_size > 1``.
    ``num_rows``: rows on this rank, at least ``lengths.sum() / cp_size``. ``parents``: index of the
    earlier sequence that each sequence continues, -1 for none. ``tokens``: lengths without padding,
    required with ``parents``.
    """
    rows = KeyRows.of(lengths, num_rows, cp_size)
    if parents is not None and tokens is not None:
        rows = rows.with_prefixes(parents, tokens)
    buckets, query_rows, key_rows = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for members in _bucket_members(lengths, rows.prefix_lengths):
        # Queries: this rank's rows of each sequence, padded to the longest of the bucket.
        start, count = rows.starts[members, None], (lengths // cp_size)[members, None]
        prefix_length = rows.prefix_lengths[members, None]
        offset = np.arange(count.max())[None]
        query_rows.append(np.where(offset < count, start + offset, -1).ravel())
        if cp_size == 1 and not prefix_length.any():
            size = offset.size
            buckets.append(Bucket(len(members), queries=size, keys=size, positions=None))
            key_rows.append(query_rows[-1])
            continue
        # Keys: the prefix, then the sequence up to the last query of this rank.
        query_position, key_count = offset, prefix_length + count
        if cp_size > 1:
            query_position = local_position(offset, count // 2, cp_rank, cp_size)
            # The keys end with the later one of this rank's two chunks.
            key_count = prefix_length + (2 * cp_size - cp_rank) * (count // 2)
        query_position = np.where(offset < count, prefix_length + query_position, 0)
        key_position = np.arange(key_count.max())[None]
        indices = rows.at(members[:, None], np.minimum(key_position, key_count - 1))
        key_rows.append(np.where(key_position < key_count, indices, -1).ravel())
        positions = _to_device(query_position, device)
        buckets.append(Bucket(len(members), offset.size, key_position.size, positions))
    queries = SlotMap.of(np.concatenate(query_rows), num_rows, device)
    # Keys are the rows of the queries, rows in several slots (0 in blank slots, which the mask
    # hides), or rows of all ranks.
    keys: SlotMap | Tensor = queries
    if len(rows.prefix_rows):
        keys = _to_device(np.concatenate(key_rows).clip(0), device)
    elif cp_size > 1:
        keys = SlotMap.of(np.concatenate(key_rows), num_rows * cp_size, device)
    return Segments(rows, tuple(buckets), queries, keys, cp_rank, cp_group)


def _bucket_members(lengths: IntArray, prefix_lengths: IntArray) -> list[IntArray]:
    """Return indices of each bucket's sequences. Sequences without tokens are in no bucket."""
    level = _level(lengths) * 1000
    level += np.where(prefix_lengths > 0, 1 + _level(prefix_lengths), 0)
    level[lengths == 0] = -1
    return [np.flatnonzero(level == value) for value in np.unique(level) if value >= 0]


def _level(lengths: IntArray) -> IntArray:
    steps = np.log(np.maximum(lengths, SHORT) / SHORT) / np.log(GROWTH)
    return np.ceil(steps).astype(np.int64)


def _to_device(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


def _ends(lengths: IntArray, device: torch.device) -> Tensor:
    return _to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)
