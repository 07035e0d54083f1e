"""Bins of indices into a list of lengths, and how to have more of them."""

import heapq
from collections.abc import Sequence
from math import ceil

from aligner.errors import DataError

Bins = list[list[int]]


def bin_count(needed: int, least: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is below neither ``needed`` nor ``least``."""
    return ceil(max(needed, least) / multiple) * multiple


def decreasing(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """``indices`` by falling length; equal lengths keep their order."""
    return sorted(indices, key=lambda index: -lengths[index])


def split_fullest(bins: Bins, lengths: Sequence[int], count: int) -> Bins:
    """Split the bin with the most tokens in two level halves until there are ``count``.

    A bin of one sequence cannot be split. One half stays in place, the other goes to the end.

    Raises:
        DataError: there are fewer sequences than ``count``.
    """
    sequences = sum(len(items) for items in bins)
    if count > sequences:
        raise DataError(
            f"{count} bins cannot be filled from {sequences} sequences; lower min_bin_count or "
            "bin_count_multiple, or pack more sequences at once"
        )
    bins = list(bins)
    heap = [_fullness(number, items, lengths) for number, items in enumerate(bins)]
    heapq.heapify(heap)
    while len(bins) < count:
        _, number = heapq.heappop(heap)
        if len(bins[number]) < 2:  # stays whole, and does not come back into the heap
            continue
        bins[number], new = _halves(bins[number], lengths)
        bins.append(new)
        for changed in (number, len(bins) - 1):
            heapq.heappush(heap, _fullness(changed, bins[changed], lengths))
    return bins


def _fullness(number: int, items: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    return -sum(lengths[index] for index in items), number


def _halves(items: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Longest first to the half with fewer tokens; neither stays empty, both keep the order."""
    halves: tuple[set[int], set[int]] = (set(), set())
    tokens = [0, 0]
    for index in decreasing(items, lengths):
        lighter = min((0, 1), key=lambda half: (tokens[half], len(halves[half])))
        halves[lighter].add(index)
        tokens[lighter] += lengths[index]
    return [i for i in items if i in halves[0]], [i for i in items if i in halves[1]]
