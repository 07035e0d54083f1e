"""Sequence packing: assignment of sequences to bins, packed rows with a limited number of tokens.

A packer reads only lengths, so every process that packs the same lengths gets the same bins.
"""

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from math import ceil

import numpy as np

from aligner.errors import ConfigError, DataError

Bins = list[list[int]]


def bin_count(count: int, minimum: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``count`` and ``minimum``."""
    return ceil(max(count, minimum) / multiple) * multiple


def decreasing(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Sort ``indices`` by decreasing ``lengths[index]``. Equal lengths keep their order."""
    return sorted(indices, key=lambda index: -lengths[index])


def split_fullest(bins: Bins, lengths: Sequence[int], count: int) -> Bins:
    """Split the bin with the most tokens, repeatedly, until there are ``count`` bins."""
    sequences = sum(len(items) for items in bins)
    if count > sequences:
        raise DataError(
            f"{count} bins cannot be filled with {sequences} sequences. Lower min_bin_count or "
            "bin_count_multiple, or pack more sequences at once"
        )
    bins = list(bins)

    def heap_entry(index: int) -> tuple[int, int]:
        return -sum(lengths[item] for item in bins[index]), index

    # Heap of all bins, fullest first.
    heap = [heap_entry(index) for index in range(len(bins))]
    heapq.heapify(heap)
    while len(bins) < count:
        _, index = heapq.heappop(heap)
        if len(bins[index]) < 2:  # cannot be split, so the bin does not return to the heap
            continue
        bins[index], second_half = _halves(bins[index], lengths)
        bins.append(second_half)
        heapq.heappush(heap, heap_entry(index))
        heapq.heappush(heap, heap_entry(len(bins) - 1))
    return bins


def _halves(items: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split items into two lists: each item, longest first, goes to the list with fewer tokens."""
    halves: tuple[set[int], set[int]] = (set(), set())
    tokens = [0, 0]
    for index in decreasing(items, lengths):
        lighter = min((0, 1), key=lambda half: (tokens[half], len(halves[half])))
        halves[lighter].add(index)
        tokens[lighter] += lengths[index]
    return [i for i in items if i in halves[0]], [i for i in items if i in halves[1]]


class SequencePacker(ABC):
    """Base class of algorithms that assign sequences to bins of at most ``bin_capacity`` tokens.

    The number of bins is at least ``min_bin_count`` and a multiple of ``bin_count_multiple``. To
    reach it, the fullest bins are split.
    """

    def __init__(
        self,
        bin_capacity: int,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        self.bin_capacity = at_least("bin_capacity", bin_capacity, 1)
        self.min_bin_count = at_least("min_bin_count", min_bin_count or 0, 0)
        self.bin_count_multiple = at_least(
            "bin_count_multiple", 1 if bin_count_multiple is None else bin_count_multiple, 1
        )

    @abstractmethod
    def _pack(self, lengths: Sequence[int]) -> Bins:
        """Assign every index of ``lengths`` to one bin within the capacity."""

    def pack(self, sequence_lengths: Sequence[int]) -> Bins:
        """Return the sequences' indices in each bin. Raises `DataError` for a too long sequence."""
        lengths = [int(length) for length in sequence_lengths]
        for index, length in enumerate(lengths):
            if not 0 <= length <= self.bin_capacity:
                raise DataError(
                    f"sequence {index} has {length} tokens, but a packed row has at most "
                    f"{self.bin_capacity}. Raise this limit, or drop the sequence"
                )
        bins = self._pack(lengths)
        count = bin_count(len(bins), self.min_bin_count, self.bin_count_multiple)
        return split_fullest(bins, lengths, count)


class ConcatenativePacker(SequencePacker):
    """Packer that fills one bin after the other with the sequences in their order."""

    def _pack(self, lengths: Sequence[int]) -> Bins:
        bins: Bins = []
        room = -1
        for index, length in enumerate(lengths):
            if length > room:
                bins.append([])
                room = self.bin_capacity
            bins[-1].append(index)
            room -= length
        return bins


def at_least(key: str, value: int, least: int) -> int:
    """Return ``value``, or raise `ConfigError` naming ``key`` if it is below ``least``."""
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}")
    return value


class FirstFitDecreasingPacker(SequencePacker):
    """Packer that adds each sequence, longest first, to the first bin with enough space."""

    def _pack(self, lengths: Sequence[int]) -> Bins:
        return first_fit(decreasing(range(len(lengths)), lengths), lengths, self.bin_capacity)


class FirstFitShufflePacker(SequencePacker):
    """Packer that adds each sequence, in random order, to the first bin with enough space."""

    def __init__(
        self,
        bin_capacity: int,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(bin_capacity, min_bin_count, bin_count_multiple)
        self.seed = seed

    def _pack(self, lengths: Sequence[int]) -> Bins:
        # A new generator per call: the order must not depend on earlier calls.
        order = np.random.Generator(np.random.PCG64(self.seed)).permutation(len(lengths))
        return first_fit(order.tolist(), lengths, self.bin_capacity)


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Add each sequence of ``order`` to the first bin with enough space. Return the bins."""
    room = np.full(len(order), capacity)  # of every possible bin
    bins: Bins = []
    for index in order:
        # Unopened bins have the full capacity, so the first bin with room is at most the next bin.
        first = int(np.argmax(room[: len(bins) + 1] >= lengths[index]))
        if first == len(bins):
            bins.append([])
        bins[first].append(index)
        room[first] -= lengths[index]
    return bins


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Packer of Johnson and Garey, "A 71/60 theorem for bin packing", 1985.

    Each sequence longer than half the capacity gets a bin. Such a bin also gets one medium sequence
    (more than a third of the capacity) or two small ones (more than a sixth). `first_fit` packs the
    rest, longest first.
    """

    def _pack(self, lengths: Sequence[int]) -> Bins:
        order = decreasing(range(len(lengths)), lengths)
        third, sixth = self.bin_capacity // 3, self.bin_capacity // 6
        # Open a bin for each large sequence. The others remain, longest first.
        large = [i for i in order if 2 * lengths[i] > self.bin_capacity]
        remaining = order[len(large) :]
        bins = [[index] for index in large]
        free_tokens = [self.bin_capacity - lengths[index] for index in large]

        def longest(at_most: int, longer_than: int = -1) -> int | None:
            position = bisect_left(remaining, -at_most, key=lambda item: -lengths[item])
            if position == len(remaining) or lengths[remaining[position]] <= longer_than:
                return None
            return remaining[position]

        def add(bin_index: int, item: int) -> None:
            remaining.remove(item)
            bins[bin_index].append(item)
            free_tokens[bin_index] -= lengths[item]

        # Add a medium sequence to each bin with space for one.
        for index in range(len(bins)):
            if (item := longest(free_tokens[index], longer_than=third)) is not None:
                add(index, item)
        # Add two small sequences to other bins, last bin first: the shortest and the longest that
        # fits. If the two shortest fit together, there is a second one.
        for index in reversed(range(len(bins))):
            shortest = [item for item in remaining if sixth < lengths[item] <= third][-2:]
            tokens = sum(lengths[item] for item in shortest)
            if len(bins[index]) == 1 and len(shortest) == 2 and tokens <= free_tokens[index]:
                add(index, shortest[-1])
                second = longest(min(free_tokens[index], third), longer_than=sixth)
                assert second is not None
                add(index, second)
        # Fill the bins with any sequences, and open new bins for the rest.
        for index in range(len(bins)):
            while (item := longest(free_tokens[index])) is not None:
                add(index, item)
        return bins + first_fit(remaining, lengths, self.bin_capacity)


class PackingAlgorithm(Enum):
    """Packing algorithms. The values are their names in the configuration."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


_PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """Return the packer called ``algorithm`` (upper or lower case). Raises `ConfigError`."""
    if isinstance(algorithm, str):
        names = {name.value: name for name in PackingAlgorithm}
        if algorithm.lower() not in names:
            raise ConfigError(
                f"packing algorithm={algorithm!r} is unknown. Choose one of {', '.join(names)}"
            )
        algorithm = names[algorithm.lower()]
    return _PACKERS[algorithm](bin_capacity, min_bin_count, bin_count_multiple)
