"""Sequences of a batch: one in each row, or several, one behind the other.

A conversation whose history was rewritten is one sample and several sequences: its row holds them
all, and its column ``position_ids`` is 0 where each begins, as in packed batches of transformers.

    input_ids      a b c d e a b x y
    position_ids   0 1 2 3 4 0 1 2 3      no token attends to one of another sequence
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Sequences(NamedTuple):
    """Places of the sequences of a batch ``[b, S]``; int64 ``[m]`` each.

    ``places``: of their first tokens, into ``b * S``. ``lengths``: tokens.
    """

    places: IntArray
    lengths: IntArray

    @classmethod
    def rows(cls, lengths: IntArray, width: int) -> "Sequences":
        """One in each row, of ``lengths`` ``[b]``; ``width``: ``S``."""
        return cls(np.arange(len(lengths)) * width, lengths)

    @classmethod
    def find(cls, position_ids: IntArray, lengths: IntArray) -> "Sequences | None":
        """Those of rows that hold several; None: every row holds one.

        ``position_ids``: ``[b, S]``, from 0 in every sequence; ``lengths``: ``[b]``, of the rows.
        """
        width = position_ids.shape[1]
        begins = (position_ids == 0) & (np.arange(width) < lengths[:, None])
        places = np.flatnonzero(begins)
        if len(places) == len(lengths):
            return None
        row = places // width
        ends = np.append(places[1:], 0)
        last = np.append(row[1:] != row[:-1], True)
        ends[last] = row[last] * width + lengths[row[last]]
        return cls(places, ends - places)

    def cut(self, input_ids: IntArray) -> IntArray:
        """The sequences as rows, right-padded with 0: ``[m, L]`` out of ``[b, S]``."""
        tokens = input_ids.ravel()
        rows = np.zeros((len(self.places), int(self.lengths.max(initial=0))), input_ids.dtype)
        for row, (place, length) in enumerate(zip(self.places, self.lengths, strict=True)):
            rows[row, :length] = tokens[place : place + length]
        return rows
