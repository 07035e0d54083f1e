"""Sequences of a batch, and the tree of runs of tokens that they make; what they share is one run.

A row holds one sequence, or several, one behind the other: a conversation whose history was
rewritten is one sample and several sequences. Its column ``position_ids`` is then 0 where each
begins, as in packed batches of transformers.

    input_ids      a b c d e a b x y
    position_ids   0 1 2 3 4 0 1 2 3      no token attends to one of another sequence

Sequences that begin alike are a tree:

    a b c d e            ┌─ [d e]
    a b c f      [a b c] ┼─ [f]
    a b c                │
    g h          [g h]

A trie over token ids whose chains are runs. Nothing says beforehand which sequences belong
together: responses to one prompt, forks of a conversation, the chosen and the rejected response of
a pair are found by their tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LEAST_SAVED = 32  # tokens that a run of several sequences saves, so that headers split no rows
LEAST_PART = 8  # sharing saves at least one token in so many, or there is none


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
        if begins.sum(1).max(initial=0) <= 1:
            return None
        places = np.flatnonzero(begins)
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


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Runs of tokens, a parent before its children.

    A sequence is the runs from a root to the one where it ends. Runs have at least one token.
    """

    starts: IntArray  # [n] position of a run's first token in its sequences
    lengths: IntArray  # [n] tokens
    parents: IntArray  # [n] run that it follows; -1: none, it begins its sequences
    examples: IntArray  # [n] one of the sequences that have it
    owners: IntArray  # [m] with `owned`: every sequence with each of its runs
    owned: IntArray  # [m]

    def num_tokens(self, multiple: int = 1) -> int:
        """Tokens of all runs, each run rounded up to a multiple."""
        return int((-(-self.lengths // multiple) * multiple).sum())


def build_prefix_tree(
    input_ids: IntArray, lengths: IntArray, least_saved: int = LEAST_SAVED
) -> PrefixTree:
    """The tree of a batch.

    Args:
        input_ids: token ids ``[b, S]``, right-padded.
        lengths: ``[b]``, at most ``S``.
        least_saved: a run of several sequences saves at least so many tokens, its length times the
            sequences but one; else each sequence has these tokens in its own run.
    """
    order = _in_order(input_ids, lengths)
    common = _common_with_previous(input_ids[order], lengths[order])
    runs: list[tuple[int, int, int]] = []  # start, length, parent
    sequences: list[IntArray] = []  # that have each run

    def add(start: int, end: int, parent: int, owners: IntArray) -> int:
        """Add a run unless it is empty; its number."""
        if end > start:
            runs.append((start, end - start, parent))
            sequences.append(owners)
        return len(runs) - 1

    waiting = [(0, len(order), 0, -1)] if len(order) else []
    while waiting:
        low, high, depth, parent = waiting.pop()
        if high - low == 1:
            add(depth, int(lengths[order[low]]), parent, order[low:high])
            continue
        end = int(common[low + 1 : high].min())  # all of them are alike up to here
        if (end - depth) * (high - low - 1) >= max(1, least_saved):
            parent = add(depth, end, parent, order[low:high])
            depth = end
        forks = low + 1 + np.flatnonzero(common[low + 1 : high] == end)
        bounds = [low, *forks.tolist(), high]
        waiting += [
            (bounds[i], bounds[i + 1], depth, parent) for i in reversed(range(len(bounds) - 1))
        ]
    counts = [len(owners) for owners in sequences]
    starts, sizes, parents = np.array(runs, np.int64).reshape(-1, 3).T
    return PrefixTree(
        starts,
        sizes,
        parents,
        examples=np.array([owners[0] for owners in sequences], np.int64),
        owners=np.concatenate([np.empty(0, np.int64), *sequences]),
        owned=np.arange(len(counts)).repeat(counts),
    )


def shared_prefixes(input_ids: IntArray, lengths: IntArray, multiple: int = 1) -> PrefixTree | None:
    """The tree of a batch where it saves enough; None: its sequences better stand for themselves.

    Arguments as in `build_prefix_tree`; ``multiple``: runs, and sequences for themselves, are
    padded to a multiple of it.
    """
    if len(lengths) < 2:
        return None
    alone = int((-(-lengths // multiple) * multiple).sum())
    tree = build_prefix_tree(input_ids, lengths)
    saved = alone - tree.num_tokens(multiple)
    return tree if saved * LEAST_PART >= alone and saved > 0 else None


def _in_order(input_ids: IntArray, lengths: IntArray) -> IntArray:
    """Sequences in lexicographic order, a prefix before what it begins; equal ones as they come."""
    # Numbers from 0 on compare like their bytes, the highest first.
    rows = np.ascontiguousarray(input_ids).astype(">i8")
    keys = [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _common_with_previous(input_ids: IntArray, lengths: IntArray) -> IntArray:
    """Tokens that a sequence and the one before it begin with alike, ``[b]``; 0 for the first."""
    common = np.zeros(len(lengths), np.int64)
    for row in range(1, len(lengths)):
        shorter = min(lengths[row - 1], lengths[row])
        unlike = input_ids[row - 1, :shorter] != input_ids[row, :shorter]
        first = int(unlike.argmax()) if shorter else 0
        common[row] = first if shorter and unlike[first] else shorter
    return common


class RowGroup(NamedTuple):
    """Adjacent rows that one micro-batch holds, and their tokens in the model.

    ``shares``: prefixes of theirs are computed once; else ``tokens`` counts every row.
    """

    rows: range
    tokens: int
    shares: bool


def prefix_groups(
    input_ids: IntArray | None,
    lengths: IntArray,
    batches: Sequence[range],
    *,
    together: int,
    multiple: int,
    max_tokens: int,
    shards: int,
) -> list[list[RowGroup]]:
    """Adjacent rows of every global batch, taken together where they begin alike.

    A group is cut where it would have more tokens than a micro-batch may, or, prefixes counted in
    every row, more than a shard's part of the batch: each of its parts has the prefix once.

    Args:
        input_ids: token ids ``[B, S]``, right-padded; None: nothing begins alike.
        lengths: ``[B]``.
        batches: rows of each global batch, multiples of ``together``.
        together: number of adjacent rows that stay together whatever they are.
        multiple: runs, and sequences for themselves, are padded to a multiple of it.
        max_tokens: of a micro-batch.
        shards: number of data-parallel ranks.
    """
    common = np.zeros_like(lengths)
    if input_ids is not None:
        common = _common_with_previous(input_ids, lengths)
    begins_alike = (common >= LEAST_SAVED) & (common * LEAST_PART >= lengths)
    alone = -(-lengths // multiple) * multiple
    new = -(-(lengths - common) // multiple) * multiple  # behind what the row before has
    groups = []
    for batch in batches:
        share = -(-int(alone[batch.start : batch.stop].sum()) // shards)
        found: list[RowGroup] = []
        start = batch.start
        while start < batch.stop:
            end = start + together
            tokens = int(alone[start] + new[start + 1 : end].sum())
            while end < batch.stop and begins_alike[end]:
                tokens += int(new[end : end + together].sum())
                if tokens > max_tokens or alone[start : end + together].sum() > share:
                    break
                end += together
            group = _group(input_ids, lengths, range(start, end), multiple)
            while group.tokens > max_tokens and len(group.rows) > together:
                group = _group(input_ids, lengths, group.rows[:-together], multiple)
            if not group.shares:  # then nothing holds more together than must be
                group = _group(input_ids, lengths, group.rows[:together], multiple)
            found.append(group)
            start = group.rows.stop
        groups.append(found)
    return groups


def _group(input_ids: IntArray | None, lengths: IntArray, rows: range, multiple: int) -> RowGroup:
    part = slice(rows.start, rows.stop)
    if len(rows) == 1:
        return RowGroup(rows, int(lengths[rows.start]), False)
    if input_ids is not None:
        tree = shared_prefixes(input_ids[part], lengths[part], multiple)
        if tree is not None:
            return RowGroup(rows, tree.num_tokens(multiple), True)
    return RowGroup(rows, int((-(-lengths[part] // multiple) * multiple).sum()), False)
