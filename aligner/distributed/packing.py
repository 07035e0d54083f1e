"""Sequence packing: which sequences share a row of at most ``bin_capacity`` tokens.

    lengths [5, 3, 4, 2], capacity 8 ──► bins [[0, 1], [2, 3]]

A packer sees only lengths and never cuts a sequence. It is a pure function of its arguments:
every process that packs the same lengths gets the same bins.
"""

import heapq
import operator
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from math import ceil
from typing import NamedTuple

import numpy as np

from aligner.errors import ConfigError, DataError

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


class SequencePacker(ABC):
    """Puts sequences into bins; subclasses define how, this class keeps the guarantees.

    Args:
        bin_capacity: tokens of a bin, at least 1.
        collect_metrics: keep `PackingMetrics` over all calls, in ``metrics``.
        min_bin_count: least number of bins.
        bin_count_multiple: the number of bins is a multiple of it.

    Where the algorithm makes too few bins, the fullest ones are split until the count is right.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        self.bin_capacity = at_least("bin_capacity", bin_capacity, 1)
        self.min_bin_count = at_least("min_bin_count", min_bin_count or 0, 0)
        self.bin_count_multiple = at_least(
            "bin_count_multiple", 1 if bin_count_multiple is None else bin_count_multiple, 1
        )
        self.metrics = PackingMetrics() if collect_metrics else None

    @abstractmethod
    def _pack(self, lengths: Sequence[int]) -> Bins:
        """Bins of indices into ``lengths``, every index once, none over capacity."""

    def pack(self, sequence_lengths: Sequence[int]) -> Bins:
        """Bins of indices into ``sequence_lengths``; every index stands in exactly one bin.

        Raises:
            DataError: a sequence is longer than the capacity, or there are fewer sequences than
                bins that must be made.
        """
        lengths = [int(length) for length in sequence_lengths]
        for index, length in enumerate(lengths):
            if not 0 <= length <= self.bin_capacity:
                raise DataError(
                    f"sequence {index} has {length} tokens, a packed row holds 0 to "
                    f"{self.bin_capacity}; raise the token budget of a micro-batch or drop the "
                    "sequence"
                )
        started = time.perf_counter()
        bins = self._pack(lengths)
        count = bin_count(len(bins), self.min_bin_count, self.bin_count_multiple)
        bins = split_fullest(bins, lengths, count)
        if self.metrics is not None:
            self.metrics.update(lengths, bins, self.bin_capacity, time.perf_counter() - started)
        return bins


class ConcatenativePacker(SequencePacker):
    """Sequences in their order; a new bin whenever the next one does not fit."""

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
    """``value`` of ``key``; `ConfigError` where it is below ``least``."""
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}")
    return value


class _Packing(NamedTuple):
    """Numbers of one packing, or sums over several."""

    sequences: int = 0
    tokens: int = 0
    capacity: int = 0  # of all bins together
    fewest_bins: int = 0  # that could hold the tokens, were sequences divisible
    utilisations: tuple[float, ...] = ()  # of each bin

    @classmethod
    def of(cls, lengths: Sequence[int], bins: Sequence[Sequence[int]], capacity: int) -> "_Packing":
        tokens = sum(lengths)
        shares = tuple(sum(lengths[index] for index in items) / capacity for items in bins)
        return cls(len(lengths), tokens, len(bins) * capacity, ceil(tokens / capacity), shares)

    def stats(self) -> dict[str, float]:
        """The published statistics.

        ``waste_ratio`` is the share of the capacity left empty, ``imbalance`` the utilisation of
        the fullest bin less that of the emptiest, ``bin_efficiency`` the fewest bins over those
        used.
        """
        used = self.tokens / self.capacity if self.capacity else 0.0
        least = min(self.utilisations, default=0.0)
        most = max(self.utilisations, default=0.0)
        bins = len(self.utilisations)
        return {
            "num_sequences": self.sequences,
            "num_bins": bins,
            "total_tokens": self.tokens,
            "waste_tokens": self.capacity - self.tokens,
            "waste_ratio": 1 - used if self.capacity else 0.0,
            "mean_utilization": used,
            "min_utilization": least,
            "max_utilization": most,
            "imbalance": most - least,
            "bin_efficiency": self.fewest_bins / bins if bins else 1.0,
        }


class PackingMetrics:
    """Statistics of one packing, and of all packings since `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every packing so far."""
        self._total, self._seconds = _Packing(), 0.0

    def update(
        self,
        sequence_lengths: Sequence[int],
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
        packing_time: float = 0.0,
    ) -> dict[str, float]:
        """Count one packing, which took ``packing_time`` seconds; returns its own statistics."""
        packing = _Packing.of(sequence_lengths, bins, bin_capacity)
        self._total = _Packing(*map(operator.add, self._total, packing))
        self._seconds += packing_time
        return packing.stats()

    def calculate_stats_only(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]], bin_capacity: int
    ) -> dict[str, float]:
        """Statistics of one packing, which is not counted; see `_Packing.stats`."""
        return _Packing.of(sequence_lengths, bins, bin_capacity).stats()

    def get_aggregated_stats(self) -> dict[str, float]:
        """Statistics over all packings, and ``packing_time``: their seconds together."""
        return {**self._total.stats(), "packing_time": self._seconds}


class FirstFitDecreasingPacker(SequencePacker):
    """Each sequence into the first bin with room, longest first; equal ones in their order."""

    def _pack(self, lengths: Sequence[int]) -> Bins:
        return first_fit(decreasing(range(len(lengths)), lengths), lengths, self.bin_capacity)


class FirstFitShufflePacker(SequencePacker):
    """First fit in a random order that ``seed`` and the number of sequences decide."""

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
        self.seed = seed

    def _pack(self, lengths: Sequence[int]) -> Bins:
        # A fresh generator per call: the order may not depend on how often a process has packed.
        order = np.random.Generator(np.random.PCG64(self.seed)).permutation(len(lengths))
        return first_fit(order.tolist(), lengths, self.bin_capacity)


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """First fit in O(n log n): a tournament tree holds the largest room of every run of bins."""
    # A leaf for every bin that there can be; unopened ones have the whole capacity, so the first
    # leaf with room is at most the next bin.
    leaves = 1 << max(0, len(order) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: Bins = []
    for index in order:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < lengths[index]:  # not on the left: the parent knows it is on the right
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Johnson and Garey, "A 71/60 theorem for bin packing", 1985.

    Sequences over half the capacity open a bin each; these bins are then filled on purpose, with
    one medium sequence (over a third) or two small ones (over a sixth), before anything else is
    packed first fit decreasing.
    """

    def _pack(self, lengths: Sequence[int]) -> Bins:
        order = decreasing(range(len(lengths)), lengths)
        large = [i for i in order if 2 * lengths[i] > self.bin_capacity]
        rest = _Pool(order[len(large) :], lengths)
        bins = [[index] for index in large]
        room = [self.bin_capacity - lengths[index] for index in large]
        self._add_medium(bins, room, rest)
        self._add_small_pairs(bins, room, rest)
        for number, items in enumerate(bins):
            while (item := rest.take_largest(room[number])) is not None:
                items.append(item)
                room[number] -= lengths[item]
        return bins + first_fit(rest.decreasing(), lengths, self.bin_capacity)

    def _add_medium(self, bins: Bins, room: list[int], rest: "_Pool") -> None:
        """Forward: to each bin the largest medium sequence that fits."""
        third = self.bin_capacity // 3
        for number, items in enumerate(bins):
            item = rest.take_largest(room[number], longer_than=third)
            if item is not None:
                items.append(item)
                room[number] -= rest.lengths[item]

    def _add_small_pairs(self, bins: Bins, room: list[int], rest: "_Pool") -> None:
        """Backward, where no medium one went: the smallest small and the largest that fits."""
        third, sixth = self.bin_capacity // 3, self.bin_capacity // 6
        for number in reversed(range(len(bins))):
            if len(bins[number]) > 1:
                continue
            pair = rest.smallest_two(sixth, third)
            if pair is None or sum(pair) > room[number]:
                continue
            first = rest.take_smallest(longer_than=sixth)
            left = room[number] - rest.lengths[first]
            # The second smallest is still there and fits, so there is one.
            second = rest.take_largest(min(left, third), longer_than=sixth)
            assert second is not None
            bins[number] += [first, second]
            room[number] = left - rest.lengths[second]


class _Pool:
    """Sequences not packed yet, found by length."""

    def __init__(self, decreasing: Sequence[int], lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self._items = list(reversed(decreasing))
        self._sizes = [lengths[index] for index in self._items]

    def take_largest(self, at_most: int, longer_than: int = -1) -> int | None:
        """Remove the longest with ``longer_than < length <= at_most``, if there is one."""
        position = bisect_right(self._sizes, at_most) - 1
        if position < 0 or self._sizes[position] <= longer_than:
            return None
        return self._take(position)

    def take_smallest(self, longer_than: int) -> int:
        """Remove the shortest with ``length > longer_than``; the caller knows there is one."""
        return self._take(bisect_right(self._sizes, longer_than))

    def smallest_two(self, longer_than: int, at_most: int) -> list[int] | None:
        """The two smallest lengths with ``longer_than < length <= at_most``."""
        start = bisect_right(self._sizes, longer_than)
        if start + 2 > bisect_right(self._sizes, at_most):
            return None
        return self._sizes[start : start + 2]

    def decreasing(self) -> list[int]:
        """Remaining sequences, longest first."""
        return self._items[::-1]

    def _take(self, position: int) -> int:
        del self._sizes[position]
        return self._items.pop(position)


class PackingAlgorithm(Enum):
    """Names of the algorithms, as the configuration spells them."""

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
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """The packer of that name (case does not matter); see `SequencePacker` for the arguments."""
    if isinstance(algorithm, str):
        names = {name.value: name for name in PackingAlgorithm}
        if algorithm.lower() not in names:
            raise ConfigError(
                f"packing algorithm={algorithm!r} is unknown; choose one of {', '.join(names)}"
            )
        algorithm = names[algorithm.lower()]
    return _PACKERS[algorithm](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
