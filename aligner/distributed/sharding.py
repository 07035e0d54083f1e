"""Assigns the rows of a global batch to shards and micro-batches, by their numbers of tokens.

Shards get about equal numbers of tokens, and equal numbers of micro-batches, some without rows.
Rows are assigned as items. An item is a row, or adjacent rows that stay together, because the loss
compares them or they share a prefix.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch

from aligner.distributed.packing import at_least, bin_count, get_packer, split_fullest
from aligner.distributed.sequences import IntArray, RowGroup, prefix_groups
from aligner.errors import DataError


class MicrobatchPlan(NamedTuple):
    """Row indices of one micro-batch, and its padded length."""

    rows: list[int]
    length: int  # padded width of a micro-batch, or padded tokens of a packed row. 0 without rows


ShardPlan = list[list[MicrobatchPlan]]
"""The micro-batches of one shard: [global batch][micro-batch]."""


def balance_rows(rows: Sequence[int], weights: Sequence[int], shards: int) -> list[list[int]]:
    """Assign ``rows`` to shards so that the sums of ``weights[row]`` are about equal.

    Longest processing time first (Graham 1969): rows in order of decreasing weight go to the shard
    with the smallest sum. Returns the sorted rows of each shard.
    """
    parts: list[list[int]] = [[] for _ in range(shards)]
    # Weight, number of rows, shard. The number of rows breaks ties, so that empty rows spread too.
    heap = [(0, 0, shard) for shard in range(shards)]
    for row in sorted(rows, key=lambda row: -weights[row]):
        weight, count, shard = heap[0]
        parts[shard].append(row)
        heapq.heapreplace(heap, (weight + weights[row], count + 1, shard))
    return [sorted(part) for part in parts]


def _plan(
    items: Sequence[RowGroup],
    batches: Sequence[range],
    shards: int,
    weights: Sequence[int],
    form: Callable[[list[list[int]]], list[list[list[int]]]],
    length: Callable[[list[int]], int],
) -> list[ShardPlan]:
    # `form` assigns each shard's items to micro-batches. `length` is of a micro-batch of items.
    plans: list[ShardPlan] = [[] for _ in range(shards)]
    for batch in batches:
        formed = form(balance_rows(batch, weights, shards))
        count = max(len(groups) for groups in formed)
        for plan, groups in zip(plans, formed, strict=True):
            groups += [[]] * (count - len(groups))
            microbatches = [
                MicrobatchPlan([row for item in group for row in items[item].rows], length(group))
                for group in groups
            ]
            plan.append(sorted(microbatches, key=lambda microbatch: -microbatch.length))
    return plans


def _padded(lengths: Sequence[int], multiple: int, max_tokens: int) -> list[int]:
    padded = [ceil(length / multiple) * multiple for length in lengths]
    for row, length in enumerate(padded):
        if length > max_tokens:
            raise DataError(
                f"row {row} has {lengths[row]} tokens, {length} when padded to a multiple of "
                f"{multiple}, more than max_tokens_per_microbatch={max_tokens}. Raise this limit "
                f"to at least {max(padded)}, or drop the row"
            )
    return padded


class LengthGroups:
    """Partitions rows into groups of at most ``max_tokens`` tokens with the least padding.

    ``padded``: padded length of every row. A group has (number of rows) x (largest padded length)
    tokens. With rows sorted by length, the groups of an optimal partition are contiguous. Dynamic
    programming finds the optimum.
    """

    def __init__(self, rows: Sequence[int], padded: Sequence[int], max_tokens: int) -> None:
        self._rows = sorted(rows, key=lambda row: -padded[row])
        self._widths = np.array([padded[row] for row in self._rows], dtype=np.int64)
        count = len(self._rows)
        # End of the largest group that starts at j. The size of empty sequences is not limited.
        largest = np.where(self._widths > 0, max_tokens // np.maximum(self._widths, 1), count)
        self._furthest_end: IntArray = np.minimum(np.arange(count) + largest, count)
        # Minimum number of groups of the rows j..
        self._min_groups: IntArray = np.zeros(count + 1, dtype=np.int64)
        for j in reversed(range(count)):
            self._min_groups[j] = 1 + self._min_groups[self._furthest_end[j]]

    @property
    def fewest(self) -> int:
        """Minimum number of groups that the token limit allows."""
        return int(self._min_groups[0])

    def cut(self, count: int) -> list[list[int]]:
        """Return ``count`` groups, at most one per row, with fewest tokens. Longest rows first."""
        count = min(count, len(self._rows))
        best_end = self._solve(count - self.fewest)
        groups = []
        start = 0
        while start < len(self._rows):
            end = int(best_end[start, count - self._min_groups[start]])
            groups.append(self._rows[start:end])
            start, count = end, count - 1
        return groups

    def _solve(self, spare: int) -> IntArray:
        # best_end[j, t]: end of the group that starts at row j, if t groups more than the minimum
        # are left for rows j.., as for the minimum tokens[j, t + 1] (t = -1 is impossible).
        rows = len(self._rows)
        tokens = np.full((rows + 1, spare + 2), np.inf)
        tokens[rows, 1] = 0.0
        best_end = np.zeros((rows, spare + 1), dtype=np.int64)
        spare_groups = np.arange(spare + 1)
        for j in reversed(range(rows)):
            ends = np.arange(j + 1, self._furthest_end[j] + 1)
            # If the first group ends early, the remaining rows may need as many groups as j..,
            # which uses one of the spare groups.
            used = self._min_groups[ends] - (self._min_groups[j] - 1)
            remaining_tokens = tokens[ends[:, None], 1 - used[:, None] + spare_groups]
            total = remaining_tokens + (self._widths[j] * (ends - j))[:, None]
            choice = total.argmin(axis=0)
            tokens[j, 1:] = total[choice, spare_groups]
            best_end[j] = ends[choice]
        return best_end


class _TokenBudget(TypedDict):
    max_tokens_per_microbatch: int  # tokens of a packed row, or rows times padded length
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]
    rows_per_group: NotRequired[int]  # adjacent rows that stay in one micro-batch, default 1
    shared_prefixes: NotRequired[bool]  # group rows with a common prefix, counted once


class DynamicBatchingArgs(_TokenBudget):
    """Arguments of ``shard_by_batch_size`` for padded micro-batches with a limit of tokens."""

    sequence_length_round: int  # padded lengths are rounded up to a multiple of this value


class SequencePackingArgs(_TokenBudget):
    """Arguments of ``shard_by_batch_size`` for micro-batches of one packed row."""

    algorithm: str  # name of a packing algorithm
    sequence_length_pad_multiple: int  # each sequence is padded to a multiple of this value
    min_bin_count: NotRequired[int]  # minimum number of packed rows per rank and global batch
    bin_count_multiple: NotRequired[int]  # the number of packed rows is a multiple of this value
    train_mb_tokens: NotRequired[int]  # unused: callers set max_tokens_per_microbatch by phase
    logprob_mb_tokens: NotRequired[int | None]  # unused


class MicroBatching(TypedDict, total=False):
    """Keyword arguments for `shard_by_batch_size`: one of the two keys, or none."""

    dynamic_batching_args: DynamicBatchingArgs
    sequence_packing_args: SequencePackingArgs


def dynamic_plan(
    columns: Mapping[str, Any], args: DynamicBatchingArgs, batches: Sequence[range], shards: int
) -> list[ShardPlan]:
    """Plan padded micro-batches for each shard.

    Row groups with a shared prefix get separate, packed micro-batches. ``columns``: columns
    of the batch. ``batches``: row indices of each global batch. Raises `DataError` if a group of
    rows exceeds the maximum number of tokens.
    """
    multiple = at_least("sequence_length_round", args["sequence_length_round"], 1)
    max_tokens = args["max_tokens_per_microbatch"]
    items, item_batches, row_lengths = _items(columns, args, batches, multiple, shards)
    # An item is a group of rows that are padded to the longest of them, so limit one row's length.
    max_row_tokens = max_tokens // args.get("rows_per_group", 1)
    max_row_tokens = at_least("max_tokens_per_microbatch", max_row_tokens, 1)
    lengths = [max(row_lengths[row] for row in item.rows) for item in items]
    padded = _padded(lengths, multiple, max_row_tokens)
    # The weight of an item is its number of tokens.
    packer = get_packer("first_fit_decreasing", max_tokens)
    shared = {index: item.tokens for index, item in enumerate(items) if item.shares}
    rows_per_item = packer.bin_capacity // max_row_tokens
    weights = [shared.get(item, rows_per_item * length) for item, length in enumerate(lengths)]

    # Items with shared prefixes are packed. Others are grouped by length. `shard_items` has the
    # item indices of each shard, and the result those of each micro-batch of each shard.
    def pack_shared(indices: list[int]) -> list[list[int]]:
        packable = [index for index in indices if index in shared]
        bins = packer.pack([shared[index] for index in packable])
        return [[packable[i] for i in positions] for positions in bins]

    def form(shard_items: list[list[int]]) -> list[list[list[int]]]:
        packed = [pack_shared(indices) for indices in shard_items]
        unshared = [[index for index in indices if index not in shared] for indices in shard_items]
        groups = [LengthGroups(indices, padded, max_row_tokens) for indices in unshared]
        # All shards get as many micro-batches as the shard that needs the most.
        pairs = list(zip(packed, groups, strict=True))
        count = max(len(bins) + group.fewest for bins, group in pairs)
        return [bins + group.cut(max(group.fewest, count - len(bins))) for bins, group in pairs]

    def length(indices: list[int]) -> int:
        return max((padded[index] for index in indices), default=0)

    return _plan(items, item_batches, shards, weights, form, length)


def packed_plan(
    columns: Mapping[str, Any], args: SequencePackingArgs, batches: Sequence[range], shards: int
) -> list[ShardPlan]:
    """Plan micro-batches of one packed row each, for each shard. Arguments: as `dynamic_plan`."""
    capacity = at_least("max_tokens_per_microbatch", args["max_tokens_per_microbatch"], 1)
    multiple = at_least("sequence_length_pad_multiple", args["sequence_length_pad_multiple"], 1)
    # Items, packer, and padded lengths.
    items, item_batches, _ = _items(columns, args, batches, multiple, shards)
    lengths = [item.tokens for item in items]
    packer = get_packer(args["algorithm"], capacity)
    minimum = args.get("min_bin_count", 0)
    count_multiple = at_least("bin_count_multiple", args.get("bin_count_multiple", 1), 1)
    padded = _padded(lengths, multiple, capacity)

    def form(parts: list[list[int]]) -> list[list[list[int]]]:
        sizes = [[padded[index] for index in indices] for indices in parts]
        packed = [packer.pack(size) for size in sizes]
        # All shards get the same number of rows, so the fullest bins of other shards are split.
        count = bin_count(max(len(bins) for bins in packed), minimum, count_multiple)
        formed = []
        for indices, size, bins in zip(parts, sizes, packed, strict=True):
            split = split_fullest(bins, size, min(count, len(indices)))
            groups = [[indices[i] for i in positions] for positions in split]
            formed.append(groups + [[]] * (count - len(groups)))
        return formed

    def length(indices: list[int]) -> int:
        return sum(padded[index] for index in indices)

    return _plan(items, item_batches, shards, lengths, form, length)


def _items(
    columns: Mapping[str, Any],
    args: _TokenBudget,
    batches: Sequence[range],
    multiple: int,
    shards: int,
) -> tuple[list[RowGroup], list[range], list[int]]:
    """Return the row groups, their indices in each global batch, and the length of each row."""
    lengths = _row_lengths(columns, args["input_key"], args["input_lengths_key"])
    size = at_least("rows_per_group", args.get("rows_per_group", 1), 1)
    if len(lengths) % size:
        raise DataError(f"{len(lengths)} rows are not a multiple of rows_per_group={size}")
    for batch in batches:
        if batch.start % size or batch.stop % size:
            raise DataError(
                f"a global batch of rows {batch.start} to {batch.stop} splits a group of {size} "
                f"adjacent rows. Make the batch size a multiple of {size}"
            )
    # Group the rows of each global batch.
    ids = torch.as_tensor(columns[args["input_key"]])
    groups = prefix_groups(
        ids.cpu().numpy() if args.get("shared_prefixes") else None,
        np.array(lengths, np.int64),
        batches,
        rows_per_group=size,
        multiple=multiple,
        max_tokens=args["max_tokens_per_microbatch"],
        shards=shards,
    )
    # Number the groups over all global batches.
    bounds = accumulate((len(batch) for batch in groups), initial=0)
    items = [item for batch in groups for item in batch]
    return items, [range(start, stop) for start, stop in pairwise(bounds)], lengths


def _row_lengths(columns: Mapping[str, Any], input_key: str, lengths_key: str) -> list[int]:
    for name, key in (("input_key", input_key), ("input_lengths_key", lengths_key)):
        if key not in columns:
            raise DataError(f"{name}={key!r} is not a column. The columns are {sorted(columns)}")
    lengths = torch.as_tensor(columns[lengths_key]).tolist()
    width = columns[input_key].shape[1]
    for row, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise DataError(
                f"{lengths_key}[{row}]={length} is outside 0..{width}, the width of "
                f"{input_key}. Give lengths in tokens without padding"
            )
    return lengths
