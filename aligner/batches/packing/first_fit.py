"""First fit: each sequence into the first bin with room for it."""

from abc import abstractmethod
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
