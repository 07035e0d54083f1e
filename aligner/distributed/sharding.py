"""Assignment of the rows of a global batch to shards and micro-batches.

Only index arithmetic: no tensor is touched here. Every function is pure, so that all processes
of a group compute the same plan from the same lengths.

    lengths ─► rows of each shard (tokens level) ─► micro-batches of each shard (same number)

Shards may have different numbers of rows: level tokens matter more. A shard with fewer rows than
there are micro-batches gets micro-batches without rows at the end.

Padded micro-batches have the least padding there is (`LengthGroups`). Of a given number of groups,
the best ones hold neighbours in length order, each group as wide as its longest row. Dynamic
programming over the suffixes of that order finds the best of them all.

Micro-batches by tokens are formed in two ways: padded under a budget, or packed. What is dealt are
items: rows, or adjacent rows that stay together, because they are compared or share prefixes.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from aligner.distributed.packing import (
    SequencePacker,
    at_least,
    bin_count,
    get_packer,
    split_fullest,
)
from aligner.distributed.sequences import RowGroup, prefix_groups
from aligner.errors import DataError


class MicrobatchPlan(NamedTuple):
    """Rows that go through the model together.

    ``rows``: their indices. ``length``: the width of the padded micro-batch or, packed, the
    tokens of the packed row, each a multiple of the configured one; 0 without rows.
    """

    rows: list[int]
    length: int


ShardPlan = list[list[MicrobatchPlan]]
"""The micro-batches of one shard: [global batch][micro-batch]."""


def global_batches(total: int, batch_size: int) -> list[range]:
    """Consecutive runs of ``batch_size`` rows; the last one may be shorter."""
    return [range(low, min(low + batch_size, total)) for low in range(0, total, max(1, batch_size))]


def split_evenly(rows: range, parts: int) -> list[range]:
    """``parts`` contiguous runs of ``rows``, sizes differing by at most one."""
    base, extra = divmod(len(rows), parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return [rows[low:high] for low, high in pairwise(bounds)]


def balance_rows(rows: Sequence[int], weights: Sequence[int], shards: int) -> list[list[int]]:
    """Share out ``rows`` so that every shard has about the same sum of ``weights[row]``.

    Longest processing time first (Graham 1969): heaviest row first, each to the lightest shard;
    the sums then differ by at most the weight of the last row that tipped the scale. Rows of a
    shard keep their order.
    """
    parts: list[list[int]] = [[] for _ in range(shards)]
    # Weight, rows, shard: among equal weights the fewest rows, so that empty rows spread too.
    heap = [(0, 0, shard) for shard in range(shards)]
    for row in sorted(rows, key=lambda row: -weights[row]):
        weight, count, shard = heap[0]
        parts[shard].append(row)
        heapq.heapreplace(heap, (weight + weights[row], count + 1, shard))
    return [sorted(part) for part in parts]


def plan_dynamic(
    lengths: Sequence[int],
    batches: Sequence[range],
    shards: int,
    max_tokens: int,
    multiple: int,
    shared: Mapping[int, int] | None = None,
    packer: SequencePacker | None = None,
) -> list[ShardPlan]:
    """Padded micro-batches of at most ``max_tokens`` tokens, padding included.

    Args:
        lengths: tokens of each item's longest row.
        batches: items of each global batch.
        shards: number of data-parallel ranks.
        max_tokens: items of a micro-batch times their padded length.
        multiple: padded lengths are rounded up to a multiple of it.
        shared: tokens of the items that share prefixes: these stand in one row without padding.
        packer: packs those, into micro-batches of their own.

    Raises:
        DataError: a single item is over ``max_tokens``.
    """
    padded = _padded(lengths, multiple, max_tokens)
    tokens = shared or {}
    rows = packer.bin_capacity // max_tokens if packer is not None else 1  # of an item
    weights = [tokens.get(item, rows * length) for item, length in enumerate(lengths)]

    def form(parts: list[list[int]]) -> list[list[list[int]]]:
        loose = [[item for item in items if item not in tokens] for items in parts]
        groups = [LengthGroups(items, padded, max_tokens) for items in loose]
        bins = [
            _bins(packer, [item for item in items if item in tokens], tokens) for items in parts
        ]
        count = max(len(own) + shard.fewest for own, shard in zip(bins, groups, strict=True))
        return [
            own + shard.cut(max(shard.fewest, count - len(own)))
            for own, shard in zip(bins, groups, strict=True)
        ]

    def length(items: list[int]) -> int:
        return max((padded[item] for item in items), default=0)

    return _plan(batches, shards, weights, form, length)


def _bins(
    packer: SequencePacker | None, items: list[int], tokens: Mapping[int, int]
) -> list[list[int]]:
    if packer is None or not items:
        return []
    return [[items[i] for i in found] for found in packer.pack([tokens[item] for item in items])]


def plan_packed(
    lengths: Sequence[int],
    batches: Sequence[range],
    shards: int,
    packer: SequencePacker,
    multiple: int,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
) -> list[ShardPlan]:
    """Micro-batches that are one packed row each, of at most ``packer.bin_capacity`` tokens.

    Args:
        lengths: tokens of each row.
        batches: rows of each global batch.
        shards: number of data-parallel ranks.
        packer: packs the rows of one shard.
        multiple: the length of every sequence is rounded up to a multiple of it.
        min_bin_count: least number of micro-batches of a shard from every global batch.
        bin_count_multiple: the number of micro-batches is a multiple of it.

    Raises:
        DataError: a single row is over the capacity.
    """
    padded = _padded(lengths, multiple, packer.bin_capacity)

    def form(parts: list[list[int]]) -> list[list[list[int]]]:
        sizes = [[padded[row] for row in rows] for rows in parts]
        packed = [packer.pack(size) for size in sizes]
        count = bin_count(max(len(bins) for bins in packed), min_bin_count, bin_count_multiple)
        formed = []
        for rows, size, bins in zip(parts, sizes, packed, strict=True):
            split = split_fullest(bins, size, min(count, len(rows)))
            groups = [[rows[i] for i in items] for items in split]
            formed.append(groups + [[]] * (count - len(groups)))
        return formed

    def length(rows: list[int]) -> int:
        return sum(padded[row] for row in rows)

    return _plan(batches, shards, lengths, form, length)


def _plan(
    batches: Sequence[range],
    shards: int,
    lengths: Sequence[int],
    form: Callable[[list[list[int]]], list[list[list[int]]]],
    length: Callable[[list[int]], int],
) -> list[ShardPlan]:
    """Level the tokens, ``form`` every shard's micro-batches, make up numbers with empty ones.

    Micro-batches go through the model largest first: a rank that runs out of memory does so at
    once, and ranks that meet inside the model (expert parallelism) bring about as much each.
    """
    plans: list[ShardPlan] = [[] for _ in range(shards)]
    for batch in batches:
        formed = form(balance_rows(batch, lengths, shards))
        count = max(len(groups) for groups in formed)
        for plan, groups in zip(plans, formed, strict=True):
            groups += [[]] * (count - len(groups))
            microbatches = (MicrobatchPlan(rows, length(rows)) for rows in groups)
            plan.append(sorted(microbatches, key=lambda microbatch: -microbatch.length))
    return plans


def _padded(lengths: Sequence[int], multiple: int, max_tokens: int) -> list[int]:
    padded = [ceil(length / multiple) * multiple for length in lengths]
    for row, length in enumerate(padded):
        if length > max_tokens:
            raise DataError(
                f"row {row} has {lengths[row]} tokens, {length} when padded to a multiple of "
                f"{multiple}, and max_tokens_per_microbatch={max_tokens}; raise the token budget "
                f"to at least {max(padded)} or drop the row"
            )
    return padded


IntArray = NDArray[np.int64]


class LengthGroups:
    """Groups into which given rows can be cut under a budget of ``max_tokens`` each.

    Args:
        rows: their indices, in any order.
        padded: padded length of every row; none over ``max_tokens``.
        max_tokens: rows of a group times the padded length of its longest.
    """

    def __init__(self, rows: Sequence[int], padded: Sequence[int], max_tokens: int) -> None:
        self._rows = sorted(rows, key=lambda row: -padded[row])
        self._widths = np.array([padded[row] for row in self._rows], dtype=np.int64)
        count = len(self._rows)
        # Where the largest group that starts at j ends. Empty sequences take no room.
        largest = np.where(self._widths > 0, max_tokens // np.maximum(self._widths, 1), count)
        self._reach: IntArray = np.minimum(np.arange(count) + largest, count)
        self._need: IntArray = np.zeros(count + 1, dtype=np.int64)
        for j in reversed(range(count)):
            self._need[j] = 1 + self._need[self._reach[j]]

    @property
    def fewest(self) -> int:
        """The smallest number of groups that keeps the budget."""
        return int(self._need[0])

    def cut(self, count: int) -> list[list[int]]:
        """``count`` groups (or one per row, where there are fewer rows), longest rows first.

        Their padded tokens together are as few as they can be.
        """
        count = min(count, len(self._rows))
        best_end = self._solve(count - self.fewest)
        groups = []
        start = 0
        while start < len(self._rows):
            end = int(best_end[start, count - self._need[start]])
            groups.append(self._rows[start:end])
            start, count = end, count - 1
        return groups

    def _solve(self, spare: int) -> IntArray:
        """End of the first group of rows ``j..``, cut into ``need[j] + t`` groups, at ``[j, t]``.

        ``t`` runs from 0 to ``spare``: more groups than that cannot be left over.
        """
        rows = len(self._rows)
        # tokens[j, t + 1]: the fewest for rows j.. in need[j] + t groups; t = -1 is impossible.
        tokens = np.full((rows + 1, spare + 2), np.inf)
        tokens[rows, 1] = 0.0
        best_end = np.zeros((rows, spare + 1), dtype=np.int64)
        left_over = np.arange(spare + 1)
        for j in reversed(range(rows)):
            ends = np.arange(j + 1, self._reach[j] + 1)
            # A group that ends early makes the rest need as many groups as j.. did: one less to
            # spare.
            used = self._need[ends] - (self._need[j] - 1)
            after = tokens[ends[:, None], 1 - used[:, None] + left_over]
            total = after + (self._widths[j] * (ends - j))[:, None]
            choice = total.argmin(axis=0)
            tokens[j, 1:] = total[choice, left_over]
            best_end[j] = ends[choice]
        return best_end


class DynamicBatchingArgs(TypedDict):
    """Arguments by which ``shard_by_batch_size`` forms micro-batches under a token budget."""

    max_tokens_per_microbatch: int  # rows times padded length, per rank
    sequence_length_round: int  # padded lengths are rounded up to a multiple of it
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]
    rows_per_group: NotRequired[int]  # adjacent rows that stay in one micro-batch; default 1
    shared_prefixes: NotRequired[bool]  # and those that begin alike; what they share counts once


class SequencePackingArgs(TypedDict):
    """Arguments by which ``shard_by_batch_size`` packs several sequences into one row."""

    max_tokens_per_microbatch: int  # tokens of a packed row
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]
    algorithm: str  # name of a packing algorithm
    sequence_length_pad_multiple: int  # each sequence is padded to a multiple of it
    min_bin_count: NotRequired[int]  # packed rows per rank and global batch, at least
    bin_count_multiple: NotRequired[int]  # their number is a multiple of it
    rows_per_group: NotRequired[int]  # adjacent rows that stay in one packed row; default 1
    shared_prefixes: NotRequired[bool]  # and those that begin alike; what they share counts once
    train_mb_tokens: NotRequired[int]  # not read: callers set max_tokens_per_microbatch by phase
    logprob_mb_tokens: NotRequired[int | None]  # likewise


class MicroBatching(TypedDict, total=False):
    """Formation of micro-batches by tokens: one of these, or neither."""

    dynamic_batching_args: DynamicBatchingArgs
    sequence_packing_args: SequencePackingArgs


def dynamic_plan(
    columns: Mapping[str, Any], args: DynamicBatchingArgs, batches: Sequence[range], shards: int
) -> list[ShardPlan]:
    """`plan_dynamic` of a batch; ``batches`` are the rows of its global batches."""
    multiple = at_least("sequence_length_round", args["sequence_length_round"], 1)
    tokens = args["max_tokens_per_microbatch"]
    size = at_least("rows_per_group", args.get("rows_per_group", 1), 1)
    budget = at_least("max_tokens_per_microbatch", tokens // size, 1)
    lengths = _row_lengths(columns, args["input_key"], args["input_lengths_key"])
    items, item_batches = _items(columns, args, lengths, batches, multiple, shards)
    plans = plan_dynamic(
        [max(lengths[row] for row in item.rows) for item in items],
        item_batches,
        shards,
        budget,
        multiple,
        {number: item.tokens for number, item in enumerate(items) if item.shares},
        get_packer("first_fit_decreasing", tokens),
    )
    return _rows_of_items(plans, items)


def packed_plan(
    columns: Mapping[str, Any], args: SequencePackingArgs, batches: Sequence[range], shards: int
) -> list[ShardPlan]:
    """`plan_packed` of a batch; ``batches`` are the rows of its global batches."""
    capacity = at_least("max_tokens_per_microbatch", args["max_tokens_per_microbatch"], 1)
    multiple = at_least("sequence_length_pad_multiple", args["sequence_length_pad_multiple"], 1)
    at_least("rows_per_group", args.get("rows_per_group", 1), 1)
    lengths = _row_lengths(columns, args["input_key"], args["input_lengths_key"])
    items, item_batches = _items(columns, args, lengths, batches, multiple, shards)
    plans = plan_packed(
        [item.tokens for item in items],
        item_batches,
        shards,
        get_packer(args["algorithm"], capacity),
        multiple,
        args.get("min_bin_count", 0),
        at_least("bin_count_multiple", args.get("bin_count_multiple", 1), 1),
    )
    return _rows_of_items(plans, items)


def _items(
    columns: Mapping[str, Any],
    args: DynamicBatchingArgs | SequencePackingArgs,
    lengths: Sequence[int],
    batches: Sequence[range],
    multiple: int,
    shards: int,
) -> tuple[list[RowGroup], list[range]]:
    """Items that are dealt, and those of each global batch."""
    size = args.get("rows_per_group", 1)
    _check_whole(len(lengths), batches, size)
    ids = torch.as_tensor(columns[args["input_key"]])
    groups = prefix_groups(
        ids.cpu().numpy() if args.get("shared_prefixes") else None,
        np.array(lengths, np.int64),
        batches,
        together=size,
        multiple=multiple,
        max_tokens=args["max_tokens_per_microbatch"],
        shards=shards,
    )
    bounds = accumulate((len(batch) for batch in groups), initial=0)
    return [item for batch in groups for item in batch], [range(*each) for each in pairwise(bounds)]


def _check_whole(rows: int, batches: Sequence[range], size: int) -> None:
    """Refuse batches that cut through ``size`` adjacent rows."""
    if rows % size:
        raise DataError(f"{rows} rows cannot be taken {size} at a time")
    for batch in batches:
        if batch.start % size or batch.stop % size:
            raise DataError(
                f"a global batch of rows {batch.start} to {batch.stop} cuts a group of {size} "
                "adjacent rows; make the batch size a multiple of it"
            )


def _rows_of_items(plans: list[ShardPlan], items: Sequence[RowGroup]) -> list[ShardPlan]:
    """Plans over items as plans over their rows."""

    def expanded(part: MicrobatchPlan) -> MicrobatchPlan:
        return part._replace(rows=[row for item in part.rows for row in items[item].rows])

    return [[[expanded(part) for part in batch] for batch in plan] for plan in plans]


def _row_lengths(columns: Mapping[str, Any], input_key: str, lengths_key: str) -> list[int]:
    for name, key in (("input_key", input_key), ("input_lengths_key", lengths_key)):
        if key not in columns:
            raise DataError(
                f"{name}={key!r}: there is no such column; the columns are {sorted(columns)}"
            )
    lengths = torch.as_tensor(columns[lengths_key]).tolist()
    width = columns[input_key].shape[1]
    for row, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise DataError(
                f"{lengths_key}[{row}]={length} is outside 0..{width}, the width of "
                f"{input_key}; give lengths in tokens, padding not counted"
            )
    return lengths
