"""Baseline that predicts preferences from length only; a reward model has to beat it."""

from collections.abc import Iterable
from typing import Protocol


class Sized(Protocol):
    """A sequence with a number of tokens."""

    @property
    def length(self) -> int:
        """Length in tokens."""
        ...


class JudgedPair(Protocol):
    """`aligner.data.preferences.Pair`, as far as its lengths go."""

    @property
    def chosen(self) -> Sized:
        """The better sequence."""
        ...

    @property
    def rejected(self) -> Sized:
        """The worse, to the same prompt."""
        ...


def length_accuracy(train: Iterable[JudgedPair], held_out: Iterable[JudgedPair]) -> float:
    """Share of ``held_out`` that "the longer is better" ranks right, or "the shorter is better".

    Which of the two rules, the training pairs decide. A pair of equal lengths counts half.
    """
    longer_is_better = _longer_chosen(train) >= 0.5
    share = _longer_chosen(held_out)
    return share if longer_is_better else 1 - share


def _longer_chosen(pairs: Iterable[JudgedPair]) -> float:
    gaps = [pair.chosen.length - pair.rejected.length for pair in pairs]
    return sum(0.5 if gap == 0 else float(gap > 0) for gap in gaps) / len(gaps)
