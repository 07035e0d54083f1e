"""Interface of all packers, and the plainest one."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from aligner.batches.packing.bins import Bins, bin_count, split_fullest
from aligner.batches.packing.metrics import PackingMetrics
from aligner.errors import ConfigError, DataError


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
        self.bin_capacity = _at_least("bin_capacity", bin_capacity, 1)
        self.min_bin_count = _at_least("min_bin_count", min_bin_count or 0, 0)
        self.bin_count_multiple = _at_least(
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
        self._check(lengths)
        started = time.perf_counter()
        bins = self._pack(lengths)
        count = bin_count(len(bins), self.min_bin_count, self.bin_count_multiple)
        bins = split_fullest(bins, lengths, count)
        if self.metrics is not None:
            self.metrics.update(lengths, bins, self.bin_capacity, time.perf_counter() - started)
        return bins

    def _check(self, lengths: Sequence[int]) -> None:
        for index, length in enumerate(lengths):
            if not 0 <= length <= self.bin_capacity:
                raise DataError(
                    f"sequence {index} has {length} tokens, a packed row holds 0 to "
                    f"{self.bin_capacity}; raise the token budget of a micro-batch or drop the "
                    "sequence"
                )


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


def _at_least(key: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}")
    return value
