"""Attention of the rows of a packed pass: the sequences that stand one after the other.

Attention must not cost the square of the packed row. The sequences are therefore taken apart into
buckets of similar length, each of which is a small right-padded batch:

    rows [R, heads, D] ─index─► slots [M, heads, D] ─split─► bucket [n, L, heads, D] ─► SDPA
    rows [R, heads, D] ◄─inverse index────────────────────── cat ◄─┘

Under context parallelism the queries are this rank's part of every sequence and the keys come from
all ranks. Where sequences share prefixes, the rows hold runs of tokens
(`aligner.distributed.sequences`): the queries are a run's, the keys also those of the runs before
it.
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
        return cls(
            rows=_indices(row_of_slot.clip(0), device),
            blank_slots=_indices(np.flatnonzero(row_of_slot < 0), device),
            slots=_indices(slot_of_row.clip(0), device),
            blank_rows=_indices(np.flatnonzero(slot_of_row < 0), device),
        )

    def to_slots(self, rows: Tensor) -> Tensor:
        """``[R, ...]`` to ``[M, ...]``, of any dtype."""
        return _Move.apply(rows, self.rows, self.blank_slots, self.slots, self.blank_rows)

    def to_rows(self, slots: Tensor) -> Tensor:
        """``[M, ...]`` to ``[R, ...]``, of any dtype."""
        return _Move.apply(slots, self.slots, self.blank_rows, self.rows, self.blank_slots)


@dataclass(frozen=True)
class SlotCopies:
    """Slots of rows that stand in several slots each; what a blank slot holds is masked."""

    rows: Tensor  # int64 [M]: row of each slot

    def to_slots(self, rows: Tensor) -> Tensor:
        """Float ``[R, ...]`` to ``[M, ...]``."""
        return take_rows(rows, self.rows)


def take_rows(source: Tensor, rows: Tensor) -> Tensor:
    """Rows of float ``[R, ...]`` at ``rows``, int64 ``[N]``, some several times: ``[N, ...]``.

    The gradient of a row that is taken several times is a sum: in float32 at the least, and on a
    CPU in the order of ``rows``, whatever the number of threads.
    """
    return _TakeRows.apply(source, rows)


class _TakeRows(torch.autograd.Function):
    """Gather forward, sum backward."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.num_rows = rows, source.shape[0]
        return source.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return add_rows(gradients[0], ctx.rows, ctx.num_rows), None


def add_rows(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Sums of float ``[N, ...]`` by their rows, int64 ``[N]``: ``[num_rows, ...]``."""
    wide = torch.promote_types(values.dtype, torch.float32)
    total = values.new_zeros((num_rows, *values.shape[1:]), dtype=wide)
    return total.index_add_(0, rows, values.to(wide)).to(values.dtype)


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


@dataclass(frozen=True)
class KeyRows:
    """Rows of the keys that sequences see, among those of all context-parallel ranks.

    The keys of a sequence are those of its prefix, which other sequences of the pass hold, and its
    own; position 0 is the first of the prefix.
    """

    lengths: IntArray  # [n] padded tokens of each sequence, over all ranks
    starts: IntArray  # [n] first row of each, the same on every rank
    num_rows: int  # of a rank
    ranks: int
    before: IntArray  # [n] tokens of each prefix
    prefix_starts: IntArray  # [n] where each begins in `prefix_rows`
    prefix_rows: IntArray  # [k] of one prefix after the other

    @classmethod
    def of(cls, lengths: IntArray, num_rows: int, ranks: int) -> "KeyRows":
        """Sequences without prefixes, one after the other."""
        local = lengths // ranks
        none = np.zeros_like(lengths)
        return cls(lengths, np.cumsum(local) - local, num_rows, ranks, none, none, none[:0])

    def following(self, parents: IntArray, tokens: IntArray) -> "KeyRows":
        """The same where each sequence follows another one, with all that comes before that.

        Args:
            parents: ``[n]``, an earlier sequence, or -1: none.
            tokens: ``[n]``, tokens of each sequence without padding, which nobody follows.
        """
        paths = {-1: np.empty(0, np.int64)}  # by parent: the prefix of those that follow it
        for parent in np.unique(parents[parents >= 0]).tolist():
            own = self._own(np.full(tokens[parent], parent), np.arange(tokens[parent]))
            paths[parent] = np.concatenate([paths[int(parents[parent])], own])
        sizes = {parent: len(path) for parent, path in paths.items()}
        begins = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        return replace(
            self,
            before=np.array([sizes[parent] for parent in parents.tolist()], np.int64),
            prefix_starts=np.array([begins[parent] for parent in parents.tolist()], np.int64),
            prefix_rows=np.concatenate(list(paths.values())),
        )

    def at(self, sequences: IntArray, positions: IntArray) -> IntArray:
        """Rows at positions of sequences, none behind their ends; shapes broadcast."""
        before = self.before[sequences]
        own = self._own(sequences, (positions - before).clip(0))
        if not len(self.prefix_rows):
            return own
        place = (self.prefix_starts[sequences] + positions).clip(max=len(self.prefix_rows) - 1)
        return np.where(positions < before, self.prefix_rows[place], own)

    def _own(self, sequences: IntArray, offsets: IntArray) -> IntArray:
        if self.ranks == 1:
            return self.starts[sequences] + offsets
        rank, offset = holder(offsets, self.lengths[sequences] // (2 * self.ranks), self.ranks)
        return rank * self.num_rows + self.starts[sequences] + offset


@dataclass(frozen=True, eq=False)
class Segments:
    """The sequences of one packed pass, on this rank."""

    places: KeyRows
    buckets: tuple[Bucket, ...]
    queries: SlotMap
    keys: SlotMap | SlotCopies
    cp_rank: int = 0
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
        places, device = self.places, self.queries.rows.device
        sequences, queries = np.arange(len(places.lengths)), places.lengths
        own = queries
        if places.ranks > 1:
            chunk = places.lengths // (2 * places.ranks)
            sequences, queries = sequences.repeat(2), chunk.repeat(2)
            chunks = np.array([self.cp_rank + 1, 2 * places.ranks - self.cp_rank])
            own = (chunk[:, None] * chunks).ravel()
        elif not len(places.prefix_rows):
            ends = _ends(queries, device)
            return Runs(queries, queries, None, ends, ends)
        keys = places.before[sequences] + own
        position = np.arange(keys.sum()) - (np.cumsum(keys) - keys).repeat(keys)
        rows = places.at(sequences.repeat(keys), position)
        ends = _ends(queries, device), _ends(keys, device)
        return Runs(queries, keys, _indices(rows, device), *ends)


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
    """Plan the attention of sequences that stand one after the other.

    Args:
        lengths: padded tokens of each sequence, multiples of ``2 * cp_size`` when that is over 1.
        num_rows: rows on this rank, at least ``lengths.sum() / cp_size``.
        device: where the indices go.
        parents: the earlier sequence whose tokens come before, -1: none; default no one follows.
        tokens: of each sequence, without padding; with ``parents``.
        cp_rank: this rank among those that share every sequence.
        cp_size: their number.
        cp_group: their group.
    """
    places = KeyRows.of(lengths, num_rows, cp_size)
    if parents is not None and tokens is not None:
        places = places.following(parents, tokens)
    buckets, query_rows, key_rows = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for members in _by_length(lengths, places.before):
        start, count = places.starts[members, None], (lengths // cp_size)[members, None]
        before = places.before[members, None]
        offset = np.arange(count.max())[None]
        query_rows.append(np.where(offset < count, start + offset, -1).ravel())
        if cp_size == 1 and not before.any():
            buckets.append(Bucket(len(members), offset.size, offset.size, None))
            key_rows.append(query_rows[-1])
            continue
        place, own = offset, count  # of the queries, and the keys up to the last of them
        if cp_size > 1:
            place = local_position(offset, count // 2, cp_rank, cp_size)
            own = (2 * cp_size - cp_rank) * (count // 2)  # up to the end of the late chunk
        place = np.where(offset < count, before + place, 0)
        seen = before + own
        position = np.arange(seen.max())[None]
        rows = places.at(members[:, None], np.minimum(position, seen - 1))
        key_rows.append(np.where(position < seen, rows, -1).ravel())
        buckets.append(Bucket(len(members), offset.size, position.size, _indices(place, device)))
    queries = SlotMap.of(np.concatenate(query_rows), num_rows, device)
    keys: SlotMap | SlotCopies = queries
    if len(places.prefix_rows):
        row_of_slot = np.concatenate(key_rows).clip(0)
        keys = SlotCopies(_indices(row_of_slot, device))
    elif cp_size > 1:
        keys = SlotMap.of(np.concatenate(key_rows), num_rows * cp_size, device)
    return Segments(places, tuple(buckets), queries, keys, cp_rank, cp_group)


def _by_length(lengths: IntArray, before: IntArray) -> list[IntArray]:
    """Indices of the sequences of each bucket; sequences without tokens are in none.

    ``before``: keys beside their own; those of a bucket are similar in number, too.
    """
    level = _level(lengths) * 1000
    level += np.where(before > 0, 1 + _level(before), 0)
    level[lengths == 0] = -1
    return [np.flatnonzero(level == number) for number in np.unique(level) if number >= 0]


def _level(lengths: IntArray) -> IntArray:
    steps = np.log(np.maximum(lengths, SHORT) / SHORT) / np.log(GROWTH)
    return np.ceil(steps).astype(np.int64)


def _indices(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


def _ends(lengths: IntArray, device: torch.device) -> Tensor:
    return _indices(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)
