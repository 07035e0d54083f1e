"""Sequence packing: which sequences share a row of at most ``bin_capacity`` tokens.

    lengths [5, 3, 4, 2], capacity 8 ──► bins [[0, 1], [2, 3]]

A packer sees only lengths and never cuts a sequence. It is a pure function of its arguments:
every process that packs the same lengths gets the same bins.
"""

from enum import Enum

from aligner.batches.packing.first_fit import (
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
)
from aligner.batches.packing.packer import ConcatenativePacker, SequencePacker
from aligner.errors import ConfigError

__all__ = ["PackingAlgorithm", "SequencePacker", "get_packer"]


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
