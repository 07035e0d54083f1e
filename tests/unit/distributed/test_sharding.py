"""Rows to shards to micro-batches: nothing lost, level tokens, equal counts, budgets kept."""

import itertools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.packing import PackingAlgorithm
from aligner.distributed.sharding import LengthGroups, balance_rows
from aligner.errors import ConfigError, DataError

WIDTH = 40
MODES = ["plain", "dynamic", "packed"]
COLUMNS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}


def batch(lengths, width=WIDTH):
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    rows = torch.arange(len(lengths))
    return BatchedDataDict(
        {
            "input_ids": rows[:, None].expand(-1, width).clone(),
            "input_lengths": lengths,
            "row": rows.tolist(),
        }
    )


def dynamic(budget, multiple=1, **changes):
    args = {"max_tokens_per_microbatch": budget, "sequence_length_round": multiple}
    return {"dynamic_batching_args": {**args, **COLUMNS, **changes}}


def packed(budget, multiple=1, algorithm="modified_first_fit_decreasing", **changes):
    args = {"max_tokens_per_microbatch": budget, "sequence_length_pad_multiple": multiple}
    return {"sequence_packing_args": {**args, **COLUMNS, "algorithm": algorithm, **changes}}


def microbatches(shard, number):
    """(lengths of the rows, planned length) of each micro-batch of a global batch."""
    part = shard.get_batch(number)
    assert len(part.micro_batch_indices) == len(part.micro_batch_lengths) == 1
    bounds = part.micro_batch_indices[0]
    assert [0, *(end for _, end in bounds)] == [*(start for start, _ in bounds), part.size]
    lengths = part["input_lengths"].tolist()
    planned = part.micro_batch_lengths[0]
    return [(lengths[a:b], size) for (a, b), size in zip(bounds, planned, strict=True)]


def round_up(length, multiple):
    return -(-length // multiple) * multiple


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(0, WIDTH), max_size=30))
    batch_size = draw(st.one_of(st.none(), st.integers(1, max(1, len(lengths)))))
    return lengths, batch_size, draw(st.integers(1, 5)), draw(st.integers(1, 8))


@settings(max_examples=80, deadline=None)
@given(case=cases(), mode=st.sampled_from(MODES), algorithm=st.sampled_from(PackingAlgorithm))
def test_order_is_restored_and_each_rank_gets_its_part_of_each_global_batch(case, mode, algorithm):
    lengths, batch_size, shards, multiple = case
    data = batch(lengths)
    modes = {"plain": {}, "dynamic": dynamic(96, multiple), "packed": packed(96, 4, algorithm)}
    sharded = data.shard_by_batch_size(shards, batch_size, allow_uneven_shards=True, **modes[mode])
    parts = sharded if mode == "plain" else sharded[0]
    assert len(parts) == shards
    # Global batch g is rows g * size ... of the caller, whoever holds them.
    size = batch_size or max(1, len(lengths))
    for number, start in enumerate(range(0, len(lengths), size)):
        rows = [row for part in parts for row in part.get_batch(number)["row"]]
        assert sorted(rows) == list(range(start, min(start + size, len(lengths))))
    results = BatchedDataDict.from_batches([{"x": part["row"]} for part in parts])
    if mode == "plain":
        results = BatchedDataDict({"x": sorted(results["x"])})
    else:
        results.reorder_data(sharded[1])
    assert results["x"] == data["row"]


@settings(max_examples=120, deadline=None)
@given(
    case=cases(),
    spare=st.integers(0, 60),
    algorithm=st.sampled_from([None, *PackingAlgorithm]),
    least=st.integers(0, 4),
    count_multiple=st.integers(1, 3),
)
def test_microbatches_keep_the_budget_and_their_number(
    case, spare, algorithm, least, count_multiple
):
    """Padded ones without an algorithm, else packed."""
    lengths, batch_size, shards, multiple = case
    budget = round_up(WIDTH, multiple) + spare
    counts = {"min_bin_count": least, "bin_count_multiple": count_multiple}
    args = packed(budget, multiple, algorithm, **counts) if algorithm else dynamic(budget, multiple)
    parts, _ = batch(lengths).shard_by_batch_size(shards, batch_size, True, **args)
    for number in range(len(parts[0].elem_counts_per_gb)):
        shown = [microbatches(part, number) for part in parts]
        (count,) = {len(shard) for shard in shown}
        for rows, planned in (item for shard in shown for item in shard):
            sizes = [round_up(length, multiple) for length in rows]
            assert planned == (sum(sizes) if algorithm else max(sizes, default=0))
            assert (planned if algorithm else len(rows) * planned) <= budget
        if algorithm is None:
            # No more micro-batches than the rank that needs most: one of them has no empty one.
            assert any(all(rows for rows, _ in shard) for shard in shown)
            continue
        assert count >= least
        assert count % count_multiple == 0
        # A rank has an empty micro-batch only when it has fewer rows than there are of them.
        for shard in shown:
            rows = sum(len(part) for part, _ in shard)
            assert sum(not part for part, _ in shard) == max(0, count - rows)


def test_dynamic_shards_on_hand():
    # 8 to the first, 7 and 6 to the second (13), 3 and 2 to the first (13), 1 to the second, which
    # has fewer rows.
    parts, order = batch([1, 2, 3, 6, 7, 8]).shard_by_batch_size(2, **dynamic(16, 4))
    # Padded 8 | 4, 4 are 16 tokens (8, 4 | 4 would be 20), and 8, 8 | 4 are 20 (8 | 8, 4 is 24).
    assert [part["row"] for part in parts] == [[5, 1, 2], [3, 4, 0]]
    assert [part.micro_batch_lengths for part in parts] == [[[8, 4]], [[8, 4]]]
    assert [part.micro_batch_indices for part in parts] == [[[[0, 1], [1, 3]]], [[[0, 2], [2, 3]]]]
    assert order == [5, 1, 2, 3, 4, 0]


def test_fewer_samples_than_shards_or_none():
    assert LengthGroups([], [], 8).cut(3) == []
    for args in (dynamic(40), packed(40)):
        parts, order = batch([7, 9]).shard_by_batch_size(4, **args)
        assert [part.size for part in parts] == [1, 1, 0, 0]
        bounds = [part.micro_batch_indices for part in parts[1:]]
        assert bounds == [[[[0, 1]]], [[[0, 0]]], [[[0, 0]]]]
        assert [part.micro_batch_lengths[0] for part in parts] == [[9], [7], [0], [0]]
        assert [next(iter(part.get_batch(0)["input_ids"].shape)) for part in parts] == [1, 1, 0, 0]
        assert order == [1, 0]
        parts, order = batch([]).shard_by_batch_size(2, **args)
        assert order == []
        assert [list(p.make_microbatch_iterator_with_dynamic_shapes()) for p in parts] == [[], []]
        assert parts[0].get_microbatch_iterator_for_packable_sequences_len() == (0, 0)


def test_shards_are_level():
    for args in (dynamic(40), packed(40)):
        parts, _ = batch([3, 30, 8, 22, 15]).shard_by_batch_size(1, **args)
        (lengths,) = parts[0].micro_batch_lengths
        assert all(a >= b for a, b in pairwise(lengths))
    parts = balance_rows(range(100), [*range(1, 101)], 7)
    sums = [sum(row + 1 for row in part) for part in parts]
    assert max(sums) - min(sums) <= 7
    assert all(part == sorted(part) for part in parts)
    # One row of 30 tokens against six of 5.
    parts, order = batch([5, 5, 30, 5, 5, 5, 5]).shard_by_batch_size(2, **packed(40))
    assert [part["row"] for part in parts] == [[2], [0, 1, 3, 4, 5, 6]]
    assert order == [2, 0, 1, 3, 4, 5, 6]
    assert parts[0].micro_batch_lengths == parts[1].micro_batch_lengths == [[30]]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({**dynamic(40), **packed(40)}, ConfigError, "dynamic_batching_args and .* are both given"),
        (dynamic(29), DataError, r"row 1 has 30 tokens.*max_tokens_per_microbatch=29.* least 30"),
        (packed(29), DataError, r"row 1 has 30 tokens.*max_tokens_per_microbatch=29.* least 30"),
        (dynamic(31, 8), DataError, "has 30 tokens, 32 when padded to a multiple of 8"),
        (packed(40, input_lengths_key="n"), DataError, r"input_lengths_key='n' .*'row'"),
        (dynamic(40, input_key="ids"), DataError, "input_key='ids' is not a column"),
        (dynamic(0), ConfigError, "max_tokens_per_microbatch=0 must be at least 1"),
        (packed(0), ConfigError, "max_tokens_per_microbatch=0 must be at least 1"),
        (dynamic(40, 0), ConfigError, "sequence_length_round=0"),
        (packed(40, algorithm="best"), ConfigError, "algorithm='best'"),
        (packed(40, bin_count_multiple=-1), ConfigError, "bin_count_multiple=-1"),
        *(
            ({**args, "batch_size": 3}, DataError, "2 rows are not a multiple of the batch size 3")
            for args in ({}, dynamic(40), packed(40))
        ),
        *(({**args, "shards": 0}, DataError, "shards=0") for args in ({}, dynamic(40), packed(40))),
    ],
)
def test_errors_name_key_value_and_remedy(args, error, message):
    with pytest.raises(error, match=message):
        batch([5, 30]).shard_by_batch_size(**{"shards": 1, **args})


def test_rows_that_cannot_be_grouped_are_refused():
    with pytest.raises(DataError, match=r"input_lengths\[1\]=30 is outside 0\.\.10"):
        batch([5, 30], width=10).shard_by_batch_size(1, **dynamic(40))
    with pytest.raises(DataError, match=r"3 rows .*rows_per_group=2"):
        batch([1, 2, 3]).shard_by_batch_size(1, **packed(8, rows_per_group=2))
    with pytest.raises(DataError, match="rows 0 to 3 splits a group of 2 adjacent rows"):
        batch([1] * 6).shard_by_batch_size(1, 3, **dynamic(8, rows_per_group=2))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)), min_size=1, max_size=15
    ),
    mode=st.sampled_from(["dynamic", "packed"]),
    shards=st.integers(1, 4),
    multiple=st.integers(1, 8),
)
def test_rows_of_a_group_stay_together(lengths, mode, shards, multiple):
    """Preference pairs: both rows in one micro-batch, the budgets kept."""
    data = batch([length for pair in lengths for length in pair])
    budget = 2 * round_up(WIDTH, multiple)
    args = {"dynamic": dynamic, "packed": packed}[mode](budget, multiple, rows_per_group=2)
    parts, order = data.shard_by_batch_size(shards, **args)
    for part in parts:
        rows = part["row"]
        padded = [round_up(length, multiple) for length in part["input_lengths"].tolist()]
        planned_lengths = part.micro_batch_lengths[0]
        for (start, end), planned in zip(part.micro_batch_indices[0], planned_lengths, strict=True):
            members = rows[start:end]
            first, second = ([row for row in members if row % 2 == odd] for odd in (0, 1))
            assert [row + 1 for row in first] == second
            sizes = padded[start:end]
            if mode == "packed":
                assert planned == sum(sizes) <= budget
            else:
                assert planned == max(sizes, default=0)
                assert planned * len(sizes) <= budget
    assert sorted(order) == list(range(data.size))


def tokens_of(groups, padded):
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
        assert tokens_of(cut, padded) == fewest_tokens(padded, budget, count)
        assert all(tokens_of([rows], padded) <= budget for rows in cut)
