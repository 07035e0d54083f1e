"""Padded micro-batches: as few tokens as any cut of the sorted rows can have."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.distributed.sharding import LengthGroups


def tokens(groups, padded):
    return sum(len(rows) * max(padded[row] for row in rows) for rows in groups)


def fewest_tokens(padded, budget, count):
    """Over all cuts of the sorted lengths in ``count`` groups within the budget; None if none."""
    ordered = sorted(padded, reverse=True)
    found = []
    for cuts in itertools.combinations(range(1, len(ordered)), count - 1):
        bounds = itertools.pairwise((0, *cuts, len(ordered)))
        sizes = [ordered[low] * (high - low) for low, high in bounds]
        if max(sizes) <= budget:
            found.append(sum(sizes))
    return min(found, default=None)


def test_on_hand():
    # Budget 16. Greedy, longest first: [8, 3] [3, 3, 2, 2, 2]: 16 + 15 = 31 tokens.
    # Best of two groups: [8] [3, 3, 3, 2, 2, 2] is over 16; so 31. Of three: [8] [3, 3, 3]
    # [2, 2, 2]: 8 + 9 + 6 = 23.
    padded = [2, 8, 3, 2, 3, 2, 3]
    groups = LengthGroups(range(7), padded, 16)
    assert groups.fewest == 2
    assert groups.cut(2) == [[1, 2], [4, 6, 0, 3, 5]]
    assert groups.cut(3) == [[1], [2, 4, 6], [0, 3, 5]]
    assert LengthGroups([4, 2], [0, 0, 5, 0, 7], 8).cut(5) == [[4], [2]]


@settings(max_examples=60, deadline=None)
@given(padded=st.lists(st.integers(0, 10), min_size=1, max_size=7), budget=st.integers(10, 40))
def test_the_cut_is_the_best_there_is(padded, budget):
    groups = LengthGroups(range(len(padded)), padded, budget)
    for count in range(1, groups.fewest):
        assert fewest_tokens(padded, budget, count) is None
    for count in range(groups.fewest, len(padded) + 1):
        cut = groups.cut(count)
        assert len(cut) == count
        assert sorted(itertools.chain(*cut)) == list(range(len(padded)))
        assert tokens(cut, padded) == fewest_tokens(padded, budget, count)
        assert all(tokens([rows], padded) <= budget for rows in cut)


@pytest.mark.parametrize("count", [0, 3])
def test_no_rows_make_no_groups(count):
    assert LengthGroups([], [], 8).cut(count) == []
