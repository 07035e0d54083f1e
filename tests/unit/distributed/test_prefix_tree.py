"""What sequences begin with in common is one run of the tree, and rows are grouped by it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sharding import dynamic, packed

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.sequences import (
    LEAST_SAVED,
    build_prefix_tree,
    prefix_groups,
    shared_prefixes,
)


def padded(*sequences):
    lengths = np.array([len(tokens) for tokens in sequences], np.int64)
    ids = np.full((len(sequences), max(lengths, default=0)), 9)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = tokens
    return ids, lengths


def tree_of(*sequences, least_saved=1):
    return build_prefix_tree(*padded(*sequences), least_saved)


def spelled(tree, ids):
    """Sequences, from the examples of their runs."""
    actual = {}
    for owner, run in zip(tree.owners, tree.owned, strict=True):
        start, length = tree.starts[run], tree.lengths[run]
        tokens = ids[tree.examples[run], start : start + length].tolist()
        actual.setdefault(int(owner), []).append((int(start), int(run), tokens))
    return {owner: sorted(runs) for owner, runs in actual.items()}


def test_trees_by_hand():
    tree = tree_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [8])
    assert (len(tree.starts), tree.num_tokens(), tree.num_tokens(multiple=4)) == (6, 8, 24)
    assert (tree.parents < np.arange(6)).all()
    tree = tree_of([1, 2, 3], [1, 2], [1, 2])
    assert sorted(zip(tree.starts.tolist(), tree.lengths.tolist(), strict=True)) == [(0, 2), (2, 1)]
    assert sorted(tree.owners[tree.owned == 0].tolist()) == [0, 1, 2]
    rows = [[1, 2, 3, 10 + row] for row in range(4)]
    assert len(tree_of(*rows, least_saved=10).starts) == 4  # 3 tokens x 3 sequences would be saved
    assert len(tree_of(*rows, least_saved=9).starts) == 5
    # What some of them share beyond it still counts, with the header.
    pair = [[1, 2, 3, 4, 4, 4, 4, 4, 4, 5 + row] for row in range(2)]
    tree = tree_of(*pair, [1, 7], least_saved=9)
    assert sorted(tree.lengths.tolist()) == [1, 1, 2, 9]
    prompt = list(range(100, 100 + LEAST_SAVED))
    assert shared_prefixes(*padded([*prompt, 1], [*prompt, 2])) is not None
    assert shared_prefixes(*padded([*prompt[1:], 1], [*prompt[1:], 2])) is None
    assert shared_prefixes(*padded([*prompt, *range(400)], [*prompt, 2])) is None  # 1 token in 13
    assert shared_prefixes(*padded(prompt)) is None
    assert shared_prefixes(*padded()) is None


SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.integers(1, 12))
def test_every_tree_spells_its_sequences(sequences, least_saved):
    ids, lengths = padded(*sequences)
    tree = build_prefix_tree(ids, lengths, least_saved)
    actual = spelled(tree, ids)
    for row, sequence in enumerate(sequences):
        position, above = 0, -1
        for start, run, tokens in actual.get(row, []):
            assert (start, tree.parents[run]) == (position, above)
            assert tokens == sequence[start : start + len(tokens)]
            position, above = start + len(tokens), run
        assert position == len(sequence)
    owners = np.bincount(tree.owned, minlength=len(tree.starts))
    assert ((owners == 1) | (tree.lengths * (owners - 1) >= least_saved)).all()
    assert (tree.lengths > 0).all()
    if least_saved == 1:
        prefixes = {tuple(tokens[: end + 1]) for tokens in sequences for end in range(len(tokens))}
        assert tree.num_tokens() == len(prefixes)


PROMPT = 64


def rollout(*groups, response=8):
    """Rows ``[n]`` of each group, which begin with one prompt."""
    sequences = [
        [*range(1000 * number, 1000 * number + PROMPT), *[500_000 + row] * response]
        for number, rows in enumerate(groups)
        for row in range(rows)
    ]
    return padded(*sequences)


def grouped(ids, lengths, batches=None, **options):
    options = {"rows_per_group": 1, "multiple": 1, "max_tokens": 10_000, "shards": 1, **options}
    actual = prefix_groups(ids, lengths, batches or [range(len(lengths))], **options)
    return [[(group.rows, group.tokens, group.shares) for group in batch] for batch in actual]


def test_where_groups_end():
    assert grouped(*rollout(3, 1, 2)) == [
        [
            (range(3), PROMPT + 24, True),
            (range(3, 4), PROMPT + 8, False),
            (range(4, 6), PROMPT + 16, True),
        ]
    ]
    actual = grouped(*rollout(4), batches=[range(3), range(3, 4)])
    assert actual == [[(range(3), PROMPT + 24, True)], [(range(3, 4), PROMPT + 8, False)]]
    sizes = [len(rows) for rows, _, _ in grouped(*rollout(5), max_tokens=PROMPT + 16)[0]]
    assert sizes == [2, 2, 1]
    assert [len(rows) for rows, _, _ in grouped(*rollout(8), shards=2)[0]] == [4, 4]
    assert [len(rows) for rows, _, _ in grouped(*rollout(8, 4), shards=2)[0]] == [6, 2, 4]
    ids, lengths = rollout(2, 2)
    ids[1] = ids[1][::-1]  # the first pair shares nothing
    actual = grouped(ids, lengths, rows_per_group=2, max_tokens=1)
    assert actual == [[(range(2), 2 * (PROMPT + 8), False), (range(2, 4), PROMPT + 16, True)]]
    ids, lengths = rollout(3)
    ids[:, LEAST_SAVED - 1] = np.arange(3)
    assert [shares for _, _, shares in grouped(ids, lengths)[0]] == [False] * 3


def rollout_batch(groups=6, rows=4, prompt=64, response=16):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 250, (groups * rows, prompt + response), generator=generator)
    ids[:, :prompt] = ids[::rows, :prompt].repeat_interleave(rows, 0)
    lengths = torch.full((groups * rows,), prompt + response)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def arguments(mode):
    if mode == "dynamic":
        return dynamic(300, 4, shared_prefixes=True)
    return packed(300, 4, "first_fit_decreasing", shared_prefixes=True)


def micro_batches(shard):
    for number in range(len(shard.elem_counts_per_gb)):
        part = shard.get_batch(number)
        for start, end in part.micro_batch_indices[0]:
            yield part.slice(start, end)


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
@pytest.mark.parametrize("shards", [1, 2])
def test_planned_micro_batches_hold_whole_groups(mode, shards):
    batch = rollout_batch()
    parts, order = batch.shard_by_batch_size(shards, 12, **arguments(mode))
    assert sorted(order) == list(range(24))
    assert len({len(shard.micro_batch_indices[0]) for shard in parts}) == 1
    passes = [tokens for shard in parts for tokens in micro_batches(shard) if tokens.size]
    assert len(passes) == 4 if shards == 1 else len(passes) <= 6
    for tokens in passes:
        tree = shared_prefixes(tokens["input_ids"].numpy(), tokens["input_lengths"].numpy())
        assert tree is not None
        assert tree.num_tokens() <= 300


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_what_shares_nothing_is_planned_beside_what_does(mode):
    batch = rollout_batch(groups=5)
    batch["input_ids"][4:11] = torch.randint(0, 250, (7, 80))
    parts, order = batch.shard_by_batch_size(1, **arguments(mode))
    assert sorted(order) == list(range(20))
    for tokens in micro_batches(parts[0]):
        tree = shared_prefixes(tokens["input_ids"].numpy(), tokens["input_lengths"].numpy())
        tokens = int(tokens["input_lengths"].sum()) if tree is None else tree.num_tokens()
        assert tokens <= 300
