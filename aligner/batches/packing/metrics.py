"""Quality of a packing of sequences: bins, waste, utilisation, imbalance."""

from collections.abc import Sequence
from math import ceil


class PackingMetrics:
    """Figures of one packing, and of all packings since `reset`."""

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
        """Count one packing, which took ``packing_time`` seconds; returns its own figures."""
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
        """Figures of one packing, which is not counted; the keys are those of `_stats`."""
        tokens = sum(sequence_lengths)
        return _stats(
            len(sequence_lengths),
            tokens,
            len(bins) * bin_capacity,
            _utilisations(sequence_lengths, bins, bin_capacity),
            ceil(tokens / bin_capacity),
        )

    def get_aggregated_stats(self) -> dict[str, float]:
        """Figures over all packings, and ``packing_time``: their seconds together."""
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
    """The figures of ``capacity`` tokens' worth of bins.

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
