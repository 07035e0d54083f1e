"""Interface of all packers, the simplest one, and statistics of a packing: waste, imbalance."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ceil

from aligner.batches.packing.bins import Bins, bin_count, split_fullest
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


class PackingMetrics:
    """Statistics of one packing, and of all packings since `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every packing so far."""
        self._sequences = 0
        self._tokens = 0
        self._capacity = 0
        self._utilisations: list[float] = []
        self._fewest_bins = 0
        self._seconds = 0.0

    def update(
        self,
        sequence_lengths: Sequence[int],
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
        packing_time: float = 0.0,
    ) -> dict[str, float]:
        """Count one packing, which took ``packing_time`` seconds; returns its own statistics."""
        tokens = sum(sequence_lengths)
        self._sequences += len(sequence_lengths)
        self._tokens += tokens
        self._capacity += len(bins) * bin_capacity
        self._utilisations += _utilisations(sequence_lengths, bins, bin_capacity)
        self._fewest_bins += ceil(tokens / bin_capacity)
        self._seconds += packing_time
        return self.calculate_stats_only(sequence_lengths, bins, bin_capacity)

    def calculate_stats_only(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]], bin_capacity: int
    ) -> dict[str, float]:
        """Statistics of one packing, which is not counted; the keys are those of `_stats`."""
        tokens = sum(sequence_lengths)
        return _stats(
            len(sequence_lengths),
            tokens,
            len(bins) * bin_capacity,
            _utilisations(sequence_lengths, bins, bin_capacity),
            ceil(tokens / bin_capacity),
        )

    def get_aggregated_stats(self) -> dict[str, float]:
        """Statistics over all packings, and ``packing_time``: their seconds together."""
        stats = _stats(
            self._sequences, self._tokens, self._capacity, self._utilisations, self._fewest_bins
        )
        return {**stats, "packing_time": self._seconds}


def _utilisations(
    lengths: Sequence[int], bins: Sequence[Sequence[int]], capacity: int
) -> list[float]:
    return [sum(lengths[index] for index in items) / capacity for items in bins]


def _stats(
    sequences: int, tokens: int, capacity: int, utilisations: Sequence[float], fewest_bins: int
) -> dict[str, float]:
    """Statistics of bins that have ``capacity`` tokens together.

    ``waste_ratio`` is the share of the capacity left empty, ``imbalance`` the utilisation of the
    fullest bin less that of the emptiest, ``bin_efficiency`` the fewest bins that could hold the
    tokens, were sequences divisible, over those used.
    """
    bins = len(utilisations)
    return {
        "num_sequences": sequences,
        "num_bins": bins,
        "total_tokens": tokens,
        "waste_tokens": capacity - tokens,
        "waste_ratio": 1 - tokens / capacity if capacity else 0.0,
        "mean_utilization": tokens / capacity if capacity else 0.0,
        "min_utilization": min(utilisations, default=0.0),
        "max_utilization": max(utilisations, default=0.0),
        "imbalance": max(utilisations, default=0.0) - min(utilisations, default=0.0),
        "bin_efficiency": fewest_bins / bins if bins else 1.0,
    }
