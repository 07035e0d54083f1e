"""Packers on hand-worked lengths, and the promises they keep on any lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.distributed.packing import FirstFitShufflePacker, PackingAlgorithm, get_packer
from aligner.errors import ConfigError, DataError

ALGORITHMS = list(PackingAlgorithm)
LENGTHS = st.lists(st.integers(0, 50), max_size=80)


def pack(algorithm, lengths, capacity, **kwargs):
    return get_packer(algorithm, capacity, **kwargs).pack(lengths)


@pytest.mark.parametrize(
    ("algorithm", "lengths", "capacity", "bins"),
    [
        # 4+5 | 3 (+8 is over 10) | 8+2; the 2 would have fitted with the 3.
        ("concatenative", [4, 5, 3, 8, 2], 10, [[0, 1], [2], [3, 4]]),
        # 8 | 5 | 4 to the 5 | 3 does not fit beside 8 or 5+4 | 2 to the 8.
        ("first_fit_decreasing", [4, 5, 3, 8, 2], 10, [[3, 4], [1, 0], [2]]),
        ("first_fit_decreasing", [5, 5, 5, 5], 10, [[0, 1], [2, 3]]),
        # The seed's order of five indices, 2 4 3 0 1: 3, 2 | 8 | 4 to the 3 and 2 | 5
        ("first_fit_shuffle", [4, 5, 3, 8, 2], 10, [[2, 4, 0], [3], [1]]),
        # Large (over 30): 40, 35, 32. Medium (over 20): 25, 21. Small (over 10): 18, 12, 11.
        #   medium, forward:  40 has room 20, none; 35 takes 25, full; 32 (room 28) takes 21 (53).
        #   small pairs, backward, bins without a medium: 40 has room 20; 11 + 12 = 23 do not fit.
        #   anything, forward: 40 takes 18 (58), nothing of 2 is left; 32+21 takes 5, room 2.
        #   the rest, first fit decreasing: 12 + 11 + 3.
        (
            *("modified_first_fit_decreasing", [40, 35, 32, 25, 21, 18, 12, 11, 5, 3], 60),
            [[0, 5], [1, 3], [2, 4, 8], [6, 7, 9]],
        ),
        # Large: 33 (room 27) and 31 (room 29). No medium one. Small: 18, 12, 11.
        #   backward: 31 takes the smallest, 11, and the largest that fits in 18: 18 (full);
        #   33: fewer than two small ones are left. Forward: 33 takes 12.
        ("modified_first_fit_decreasing", [33, 31, 18, 12, 11], 60, [[0, 3], [1, 4, 2]]),
    ],
)
def test_bins_by_hand(algorithm, lengths, capacity, bins):
    assert pack(algorithm, lengths, capacity) == bins


def test_bins_by_number_seed_and_name():
    # Bins of 100. FFD: 51+27 six times, 26 thrice twice, 23 four times thrice: 11 bins.
    # Modified: 51+23+26 six times, 27 thrice twice, the six 23 left in two: 10 bins.
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert len(pack("first_fit_decreasing", lengths, 100)) == 11
    assert len(pack("modified_first_fit_decreasing", lengths, 100)) == 10
    # 6+4 and 3+3+1: the first bin is fuller and goes into 6 | 4, then 3+3+1 into 3+1 | 3.
    lengths = [6, 4, 3, 3, 1]
    assert pack("first_fit_decreasing", lengths, 10) == [[0, 1], [2, 3, 4]]
    assert pack("first_fit_decreasing", lengths, 10, min_bin_count=3) == [[0], [2, 3, 4], [1]]
    four = [[0], [2, 4], [1], [3]]
    assert pack("first_fit_decreasing", lengths, 10, bin_count_multiple=4) == four
    # The same every time, and another with another seed.
    lengths = list(range(1, 60))
    packer = get_packer("first_fit_shuffle", 64)
    assert packer.pack(lengths) == packer.pack(lengths)
    assert FirstFitShufflePacker(64).pack(lengths) == packer.pack(lengths)
    assert FirstFitShufflePacker(64, seed=1).pack(lengths) != packer.pack(lengths)
    # Names are the enum's in any case.
    assert type(get_packer("First_Fit_Decreasing", 8)) is type(
        get_packer(PackingAlgorithm.FIRST_FIT_DECREASING, 8)
    )
    with pytest.raises(ConfigError, match=r"packing algorithm='best_fit' .*concatenative"):
        get_packer("best_fit", 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(50, 120), data=st.data())
def test_every_sequence_once_within_capacity_and_count(algorithm, lengths, capacity, data):
    least = data.draw(st.integers(0, max(1, len(lengths) // 2)))
    multiple = data.draw(st.integers(1, max(1, len(lengths) // 3)))
    packer = get_packer(algorithm, capacity, min_bin_count=least, bin_count_multiple=multiple)
    required = max(least, len(pack(algorithm, lengths, capacity)))
    if -(-required // multiple) * multiple > len(lengths):
        with pytest.raises(DataError, match="cannot be filled"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert sorted(index for items in bins for index in items) == list(range(len(lengths)))
    assert all(items for items in bins)
    assert all(sum(lengths[index] for index in items) <= capacity for items in bins)
    assert len(bins) >= least
    assert len(bins) % multiple == 0


def naive_first_fit(order, lengths, capacity):
    bins, rooms = [], []
    for index in order:
        fitting = [number for number, room in enumerate(rooms) if lengths[index] <= room]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            rooms.append(capacity)
        bins[fitting[0]].append(index)
        rooms[fitting[0]] -= lengths[index]
    return bins


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS)
def test_the_tree_finds_the_first_bin_that_fits(lengths):
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    assert pack("first_fit_decreasing", lengths, 50) == naive_first_fit(order, lengths, 50)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_errors_name_the_sequence_the_key_and_the_remedy(algorithm):
    with pytest.raises(DataError, match=r"sequence 1 has 11 tokens.*10.*Raise this limit"):
        pack(algorithm, [3, 11], 10)
    with pytest.raises(DataError, match=r"4 bins .*2 sequences.* min_bin_count"):
        pack(algorithm, [3, 3], 10, min_bin_count=3, bin_count_multiple=2)
    with pytest.raises(ConfigError, match="bin_capacity=0 must be at least 1"):
        get_packer(algorithm, 0)
    with pytest.raises(ConfigError, match="bin_count_multiple=0"):
        get_packer(algorithm, 1, bin_count_multiple=0)
