"""First fit, each sequence into the first bin with room for it, and its modified form."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from aligner.batches.packing.bins import Bins, decreasing
from aligner.batches.packing.packer import SequencePacker


class FirstFitPacker(SequencePacker):
    """Each sequence into the first bin with room for it; subclasses choose the order."""

    @abstractmethod
    def _order(self, lengths: Sequence[int]) -> list[int]:
        """The indices in the order in which they are packed."""

    def _pack(self, lengths: Sequence[int]) -> Bins:
        return first_fit(self._order(lengths), lengths, self.bin_capacity)


class FirstFitDecreasingPacker(FirstFitPacker):
    """First fit, longest first; equal lengths in their given order."""

    def _order(self, lengths: Sequence[int]) -> list[int]:
        return decreasing(range(len(lengths)), lengths)


class FirstFitShufflePacker(FirstFitPacker):
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

    def _order(self, lengths: Sequence[int]) -> list[int]:
        # A fresh generator per call: the order may not depend on how often a process has packed.
        order = np.random.Generator(np.random.PCG64(self.seed)).permutation(len(lengths))
        return [int(index) for index in order]


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
