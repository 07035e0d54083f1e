"""Finds the sequences of a batch and their common prefixes.

A row usually contains one sequence. A conversation whose history was rewritten is a row of several
consecutive sequences: ``position_ids`` is 0 at the first token of each sequence, and no token
attends to another sequence. Sequences with common prefixes form a tree. Its nodes are runs of
consecutive tokens, and a common prefix is one run:

    a b c d e            ┌─ [d e]
    a b c f      [a b c] ┼─ [f]
    a b c                │
    g h          [g h]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LEAST_SAVED = 32  # minimum number of tokens that a shared run saves. Short headers are not shared.
LEAST_PART = 8  # sharing must save at least 1 in LEAST_PART tokens


class Sequences(NamedTuple):
    """Offsets and lengths of the m sequences in a batch ``[b, S]``, each an array ``[m]``."""

    offsets: IntArray  # index of each sequence's first token in the flattened batch
    lengths: IntArray  # tokens

    @classmethod
    def rows(cls, lengths: IntArray, width: int) -> "Sequences":
        """Return one sequence per row of a batch. ``lengths``: ``[b]``. ``width``: ``S``."""
        return cls(np.arange(len(lengths)) * width, lengths)

    @classmethod
    def find(cls, position_ids: IntArray, lengths: IntArray) -> "Sequences | None":
        """Find the sequences in the rows of a batch. Returns None if no row contains several.

        ``position_ids``: ``[b, S]``, 0 at the start of each sequence. ``lengths``: number of tokens
        in each row, ``[b]``.
        """
        width = position_ids.shape[1]
        is_start = (position_ids == 0) & (np.arange(width) < lengths[:, None])
        if is_start.sum(1).max(initial=0) <= 1:
            return None
        offsets = np.flatnonzero(is_start)
        row = offsets // width
        # A sequence ends at the next sequence of its row, or at the end of the row.
        ends = np.append(offsets[1:], 0)
        last = np.append(row[1:] != row[:-1], True)
        ends[last] = row[last] * width + lengths[row[last]]
        return cls(offsets, ends - offsets)

    def cut(self, input_ids: IntArray) -> IntArray:
        """Copy the sequences from token ids ``[b, S]`` to rows ``[m, L]``, right-padded with 0."""
        tokens = input_ids.ravel()
        rows = np.zeros((len(self.offsets), int(self.lengths.max(initial=0))), input_ids.dtype)
        for row, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            rows[row, :length] = tokens[offset : offset + length]
        return rows


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Prefixes that sequences share, as a tree of n runs of tokens.

    A sequence is the concatenation of the runs from a root to a node. Parents precede children.
    """

    starts: IntArray  # [n] position of a run's first token in its sequences
    lengths: IntArray  # [n] number of tokens of a run
    parents: IntArray  # [n] index of the run before, or -1 at the start of sequences
    examples: IntArray  # [n] index of one sequence that contains the run
    # The m pairs of a sequence and a run in the sequence.
    owners: IntArray  # [m] index of the sequence
    owned: IntArray  # [m] index of the run

    def num_tokens(self, multiple: int = 1) -> int:
        """Return the total number of tokens, with each run padded to a multiple of ``multiple``."""
        return int((-(-self.lengths // multiple) * multiple).sum())


def build_prefix_tree(
    input_ids: IntArray, lengths: IntArray, least_saved: int = LEAST_SAVED
) -> PrefixTree:
    """Build the prefix tree of token ids ``[b, S]``, right-padded, with ``lengths`` ``[b]``.

    A run that k sequences share saves (k - 1) times its length in tokens. A common prefix becomes a
    separate run only if this saves at least ``least_saved`` tokens.
    """
    # In lexicographic order, sequences with a common prefix are adjacent.
    order = _sorted_sequences(input_ids, lengths)
    common = _common_with_previous(input_ids[order], lengths[order])
    runs: list[tuple[int, int, int]] = []  # (start, length, parent)
    run_owners: list[IntArray] = []  # for each run, the sequences that contain the run

    def add(start: int, end: int, parent: int, owners: IntArray) -> int:
        if end > start:
            runs.append((start, end - start, parent))
            run_owners.append(owners)
        return len(runs) - 1  # index of the added run

    # Visit ranges [low, high) of sequences that agree in their first `depth` tokens, depth first.
    # `parent` is the run that ends at `depth`.
    stack = [(0, len(order), 0, -1)] if len(order) else []
    while stack:
        low, high, depth, parent = stack.pop()
        if high - low == 1:  # a single sequence: its remaining tokens are a leaf
            add(depth, int(lengths[order[low]]), parent, order[low:high])
            continue
        # Add the range's common prefix, up to `end`, as a run if sharing saves enough tokens.
        end = int(common[low + 1 : high].min())
        if (end - depth) * (high - low - 1) >= max(1, least_saved):
            parent = add(depth, end, parent, order[low:high])
            depth = end
        # Split the range before each sequence that differs from the previous one at `end`.
        splits = low + 1 + np.flatnonzero(common[low + 1 : high] == end)
        ranges = list(pairwise([low, *splits.tolist(), high]))
        stack += [(start, stop, depth, parent) for start, stop in reversed(ranges)]
    # Convert the lists to arrays.
    counts = [len(owners) for owners in run_owners]
    starts, sizes, parents = np.array(runs, np.int64).reshape(-1, 3).T
    return PrefixTree(
        starts,
        sizes,
        parents,
        examples=np.array([owners[0] for owners in run_owners], np.int64),
        owners=np.concatenate([np.empty(0, np.int64), *run_owners]),
        owned=np.arange(len(counts)).repeat(counts),
    )


def shared_prefixes(input_ids: IntArray, lengths: IntArray, multiple: int = 1) -> PrefixTree | None:
    """Build the prefix tree of a batch, or return None if the tree saves too few tokens.

    ``input_ids``: ``[b, S]``, right-padded. ``lengths``: ``[b]``. ``multiple``: runs of the tree,
    or whole sequences without a tree, are padded to its multiples.
    """
    if len(lengths) < 2:
        return None
    unshared = int((-(-lengths // multiple) * multiple).sum())
    tree = build_prefix_tree(input_ids, lengths)
    saved = unshared - tree.num_tokens(multiple)
    return tree if saved * LEAST_PART >= unshared and saved > 0 else None


def _sorted_sequences(input_ids: IntArray, lengths: IntArray) -> IntArray:
    """Return the indices [b] that sort the sequences lexicographically by token ids (stable)."""
    # Non-negative integers compare like their big-endian bytes.
    rows = np.ascontiguousarray(input_ids).astype(">i8")
    keys = [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _common_with_previous(input_ids: IntArray, lengths: IntArray) -> IntArray:
    """For each row, return the length [b] of its common prefix with the previous row."""
    common = np.zeros(len(lengths), np.int64)
    for row in range(1, len(lengths)):
        shorter = min(lengths[row - 1], lengths[row])
        differs = input_ids[row - 1, :shorter] != input_ids[row, :shorter]
        first = int(differs.argmax()) if shorter else 0
        common[row] = first if shorter and differs[first] else shorter
    return common


class RowGroup(NamedTuple):
    """Adjacent rows that must be in the same micro-batch."""

    rows: range
    tokens: int  # number of tokens to compute. Without ``shares``, the sum over rows
    shares: bool  # whether common prefixes are computed once


def prefix_groups(
    input_ids: IntArray | None,
    lengths: IntArray,
    batches: Sequence[range],
    *,
    rows_per_group: int,
    multiple: int,
    max_tokens: int,
    shards: int,
) -> list[list[RowGroup]]:
    """Group adjacent rows with a common prefix. Returns the groups of each global batch.

    A group has at most ``max_tokens`` tokens, where the common prefix counts once. A group has at
    most 1 / ``shards`` of the tokens of the global batch, where the prefix counts in every row.

    Args:
        input_ids: token ids ``[B, S]``, right-padded. None: ignore common prefixes.
        lengths: number of tokens of each row, ``[B]``.
        batches: row indices of each global batch.
        rows_per_group: number of adjacent rows, such as a pair, that are never separated.
        multiple: prefixes, their continuations and other rows are padded to its multiples.
        max_tokens: maximum number of tokens in a micro-batch.
        shards: number of shards of a global batch.
    """
    common = np.zeros_like(lengths)
    if input_ids is not None:
        common = _common_with_previous(input_ids, lengths)
    shares_prefix = (common >= LEAST_SAVED) & (common * LEAST_PART >= lengths)
    unshared = -(-lengths // multiple) * multiple
    new = -(-(lengths - common) // multiple) * multiple  # tokens after the common prefix
    groups = []
    for batch in batches:
        shard_tokens = -(-int(unshared[batch.start : batch.stop].sum()) // shards)
        batch_groups: list[RowGroup] = []
        start = batch.start
        while start < batch.stop:
            # Extend the group by an estimate of its tokens.
            end = start + rows_per_group
            tokens = int(unshared[start] + new[start + 1 : end].sum())
            while end < batch.stop and shares_prefix[end]:
                next_end = end + rows_per_group
                tokens += int(new[end:next_end].sum())
                if tokens > max_tokens or unshared[start:next_end].sum() > shard_tokens:
                    break
                end = next_end
            # Count the tokens exactly, and shrink the group to the limit.
            group = _group(input_ids, lengths, range(start, end), multiple)
            while group.tokens > max_tokens and len(group.rows) > rows_per_group:
                group = _group(input_ids, lengths, group.rows[:-rows_per_group], multiple)
            if not group.shares:  # without sharing there is no reason for a larger group
                group = _group(input_ids, lengths, group.rows[:rows_per_group], multiple)
            batch_groups.append(group)
            start = group.rows.stop
        groups.append(batch_groups)
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
