"""Assignment of the rows of a global batch to shards and micro-batches.

Only index arithmetic: no tensor is touched here. Every function is pure, so that all processes
of a group compute the same plan from the same lengths.

    lengths ─► rows of each shard (tokens level) ─► micro-batches of each shard (same number)

Shards may have different numbers of rows: level tokens matter more. A shard with fewer rows than
there are micro-batches gets micro-batches without rows at the end.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from aligner.batches.length_groups import LengthGroups
from aligner.batches.packing import SequencePacker
from aligner.batches.packing.bins import bin_count, split_fullest
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
    lengths: Sequence[int], batches: Sequence[range], shards: int, max_tokens: int, multiple: int
) -> list[ShardPlan]:
    """Padded micro-batches of at most ``max_tokens`` tokens, padding included.

    Args:
        lengths: tokens of each row.
        batches: rows of each global batch.
        shards: number of data-parallel ranks.
        max_tokens: rows of a micro-batch times their padded length.
        multiple: padded lengths are rounded up to a multiple of it.

    Raises:
        DataError: a single row is over ``max_tokens``.
    """
    padded = _padded(lengths, multiple, max_tokens)

    def form(parts: list[list[int]]) -> list[list[list[int]]]:
        groups = [LengthGroups(rows, padded, max_tokens) for rows in parts]
        count = max(shard.fewest for shard in groups)
        return [shard.cut(count) for shard in groups]

    def length(rows: list[int]) -> int:
        return max((padded[row] for row in rows), default=0)

    return _plan(batches, shards, lengths, form, length)


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
