"""Padded micro-batches with the least padding: a partition of rows in order of their length.

Of a given number of groups, the best ones hold neighbours in length order, each group as wide as
its longest row. Dynamic programming over the suffixes of that order finds the best of them all.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class LengthGroups:
    """Groups into which given rows can be cut under a budget of ``max_tokens`` each.

    Args:
        rows: their indices, in any order.
        padded: padded length of every row; none over ``max_tokens``.
        max_tokens: rows of a group times the padded length of its longest.
    """

    def __init__(self, rows: Sequence[int], padded: Sequence[int], max_tokens: int) -> None:
        self._rows = sorted(rows, key=lambda row: -padded[row])
        self._widths = np.array([padded[row] for row in self._rows], dtype=np.int64)
        count = len(self._rows)
        # Where the largest group that starts at j ends. Empty sequences take no room.
        largest = np.where(self._widths > 0, max_tokens // np.maximum(self._widths, 1), count)
        self._reach: IntArray = np.minimum(np.arange(count) + largest, count)
        self._need: IntArray = np.zeros(count + 1, dtype=np.int64)
        for j in reversed(range(count)):
            self._need[j] = 1 + self._need[self._reach[j]]

    @property
    def fewest(self) -> int:
        """The smallest number of groups that keeps the budget."""
        return int(self._need[0])

    def cut(self, count: int) -> list[list[int]]:
        """``count`` groups (or one per row, where there are fewer rows), longest rows first.

        Their padded tokens together are as few as they can be.
        """
        count = min(count, len(self._rows))
        best_end = self._solve(count - self.fewest)
        groups = []
        start = 0
        while start < len(self._rows):
            end = int(best_end[start, count - self._need[start]])
            groups.append(self._rows[start:end])
            start, count = end, count - 1
        return groups

    def _solve(self, spare: int) -> IntArray:
        """End of the first group of rows ``j..``, cut into ``need[j] + t`` groups, at ``[j, t]``.

        ``t`` runs from 0 to ``spare``: more groups than that cannot be left over.
        """
        rows = len(self._rows)
        # tokens[j, t + 1]: the fewest for rows j.. in need[j] + t groups; t = -1 is impossible.
        tokens = np.full((rows + 1, spare + 2), np.inf)
        tokens[rows, 1] = 0.0
        best_end = np.zeros((rows, spare + 1), dtype=np.int64)
        left_over = np.arange(spare + 1)
        for j in reversed(range(rows)):
            ends = np.arange(j + 1, self._reach[j] + 1)
            # A group that ends early makes the rest need as many groups as j.. did: one less to
            # spare.
            used = self._need[ends] - (self._need[j] - 1)
            after = tokens[ends[:, None], 1 - used[:, None] + left_over]
            total = after + (self._widths[j] * (ends - j))[:, None]
            choice = total.argmin(axis=0)
            tokens[j, 1:] = total[choice, left_over]
            best_end[j] = ends[choice]
        return best_end
