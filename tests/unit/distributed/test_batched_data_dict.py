"""Cutting up, joining and ordering batches, on hand-written rows."""

import pytest
import torch
from test_sharding import dynamic

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import DataError


def batch(rows=4):
    return BatchedDataDict(
        {
            "ids": torch.arange(rows * 3).reshape(rows, 3),
            "text": [f"row {i}" for i in range(rows)],
            "length": torch.arange(rows),
        }
    )


def test_shards_take_their_part_of_every_global_batch():
    shards = batch(8).shard_by_batch_size(2, batch_size=4)
    assert [s["length"].tolist() for s in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shards[1]["text"] == ["row 2", "row 3", "row 6", "row 7"]
    whole = batch(4).shard_by_batch_size(2)
    assert [s["length"].tolist() for s in whole] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match=r"5 rows .* evenly into 2 shards"):
        batch(5).shard_by_batch_size(2)
    with pytest.raises(DataError, match="8 rows are not a multiple of the batch size 3"):
        batch(8).shard_by_batch_size(1, batch_size=3)
    shards = batch(7).shard_by_batch_size(2, batch_size=5, allow_uneven_shards=True)
    assert [shard.elem_counts_per_gb for shard in shards] == [[3, 1], [2, 1]]
    parts = [shard.get_batch(1)["length"].tolist() for shard in shards]
    assert parts == [[5], [6]]
    assert shards[1].get_batch(1, 2)["length"].tolist() == [6]  # by rows, when told how many
    with pytest.raises(DataError, match=r"global batch 2 is outside 0\.\.1"):
        shards[0].get_batch(2)
    with pytest.raises(DataError, match="Pass batch_size"):
        batch(4).get_batch(0)
    for rows, expected in ((5, [3, 2]), (2, [1, 1, 0, 0]), (0, [0, 0])):
        parts = batch(rows).shard_by_batch_size(len(expected), allow_uneven_shards=True)
        assert [part.size for part in parts] == expected
        assert BatchedDataDict.from_batches(parts)["length"].tolist() == list(range(rows))


def test_from_batches_pads_to_the_right_with_the_columns_value():
    joined = BatchedDataDict.from_batches(
        [
            {"ids": torch.tensor([[1, 2]]), "lp": torch.tensor([[0.5, 0.5]]), "name": ["a"]},
            {"ids": torch.tensor([[3, 4, 5]]), "lp": torch.tensor([[1.0, 1, 1]]), "name": ["b"]},
        ],
        pad_value_dict={"ids": 9},
    )
    assert joined["ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert joined["lp"].tolist() == [[0.5, 0.5, 0], [1, 1, 1]]
    assert joined["name"] == ["a", "b"]
    joined = BatchedDataDict.from_batches([{"x": torch.zeros(0, 9)}, {"x": torch.ones(1, 2)}])
    assert joined["x"].shape == (1, 2)
    with pytest.raises(DataError, match="batch 1 has columns"):
        BatchedDataDict.from_batches([{"a": [1]}, {"b": [1]}])
    # Dimension 1 of deeper tensors.
    narrow, wide = torch.full((1, 1, 2), 7), torch.ones(1, 2, 2, dtype=torch.int64)
    for name, padding in (("x", 0), ("kept_ids", -1)):
        joined = BatchedDataDict.from_batches([{name: narrow}, {name: wide}])
        assert joined[name].tolist() == [[[7, 7], [padding, padding]], [[1, 1], [1, 1]]]


def test_order_size_and_device():
    data = batch(4)
    order = [2, 0, 3, 1]  # row order[i] of the original stands at i
    shuffled = data.select_indices(order)
    shuffled.reorder_data(order)
    assert shuffled["length"].tolist() == [0, 1, 2, 3]
    assert shuffled["text"] == data["text"]
    with pytest.raises(DataError, match="every index"):
        shuffled.reorder_data([0, 0, 1, 2])
    data = BatchedDataDict({"a": [1, 2], "b": [1]})
    with pytest.raises(DataError, match="different lengths"):
        _ = data.size
    data = batch(1)
    assert data.to("meta") is data
    assert data["ids"].device.type == "meta"
    assert data["text"] == ["row 0"]


def test_parts_and_repetitions():
    data = batch(6)
    assert data.chunk(1, 3)["length"].tolist() == [2, 3]
    assert data.slice(1, 3)["text"] == ["row 1", "row 2"]
    assert data.get_batch(1, 4)["length"].tolist() == [4, 5]
    with pytest.raises(DataError, match="outside"):
        data.get_batch(2, 4)
    with pytest.raises(DataError, match="evenly"):
        data.chunk(0, 4)
    data = batch(4)
    data.slice(0, 2)["length"][0] = 7
    assert data["length"][0] == 7
    data = batch(2).repeat_interleave(2)
    assert data["length"].tolist() == [0, 0, 1, 1]
    assert data["text"] == ["row 0", "row 0", "row 1", "row 1"]
    data = batch(2)
    data.truncate_tensors(dim=1, truncated_len=2)
    assert data["ids"].shape == (2, 2)
    assert data["length"].shape == (2,)


def test_ranks_with_fewer_rows_run_as_many_microbatches():
    parts = list(batch(5).make_microbatch_iterator(2))
    assert [p["length"].tolist() for p in parts] == [[0, 1], [2, 3], [4]]
    shards = batch(5).shard_by_batch_size(3, allow_uneven_shards=True)  # 2, 2 and 1 rows
    for shard in (*shards, *(shard.get_batch(0) for shard in shards)):
        sizes = [part.size for part in shard.make_microbatch_iterator(1)]
        assert sizes == ([1, 1] if shard.size == 2 else [1, 0])
    assert [len(list(shard.make_microbatch_iterator(2))) for shard in shards] == [1, 1, 1]


def tokens(lengths, **batch_size):
    """One shard, with micro-batches of 6 tokens."""
    lengths = torch.tensor(lengths)
    data = BatchedDataDict({"ids": torch.ones(len(lengths), 6), "n": lengths, "x": [*lengths]})
    args = dynamic(6, 2, input_key="ids", input_lengths_key="n")
    return data.shard_by_batch_size(1, **batch_size, **args)


def test_microbatches_of_a_token_budget():
    ((shard,), order) = tokens([1, 5, 3, 2])
    parts = list(shard.make_microbatch_iterator_with_dynamic_shapes())
    assert [part["n"].tolist() for part in parts] == [[5], [3], [1, 2]]
    assert [tuple(part["ids"].shape) for part in parts] == [(1, 6), (1, 4), (2, 2)]
    assert shard.get_microbatch_iterator_dynamic_shapes_len() == 3
    assert order == [1, 2, 0, 3]
    assert shard["ids"].shape == (4, 6)  # the shard itself is left alone
    parts = list(shard.make_microbatch_iterator_for_packable_sequences())
    assert [part["n"].tolist() for part in parts] == [[5], [3], [1, 2]]
    assert shard.get_microbatch_iterator_for_packable_sequences_len() == (3, 6)
    # A global batch brings its own.
    ((shard,), _) = tokens([1, 5, 3, 2], batch_size=2)
    assert shard.elem_counts_per_gb == [2, 2]
    second = shard.get_batch(1, 1)  # the size of a batch is the shard's to say
    assert second["n"].tolist() == [3, 2]
    assert second.micro_batch_indices == [[[0, 1], [1, 2]]]
    assert second.micro_batch_lengths == [[4, 2]]
    with pytest.raises(DataError, match=r"2 global batches.* get_batch"):
        shard.get_microbatch_iterator_dynamic_shapes_len()
    with pytest.raises(DataError, match=r"no micro-batches.* shard_by_batch_size"):
        list(batch().make_microbatch_iterator_for_packable_sequences())
