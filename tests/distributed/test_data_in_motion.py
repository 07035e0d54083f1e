"""Three processes exchange batches of different sizes, none included."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORLD = 3
WORKER = Path(__file__).with_name("data_worker.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    output = tmp_path_factory.mktemp("data") / "seen"
    run_ranks(WORKER, WORLD, [output], timeout_s=180)
    return [torch.load(f"{output}.{rank}", weights_only=True) for rank in range(WORLD)]


def test_all_gather_joins_rows_in_rank_order_on_every_rank(seen):
    for rank in range(WORLD):
        gathered = seen[rank]["gathered"]
        assert gathered["ids"].tolist() == [[10, 10, 0], [20, 20, 20], [20, 20, 20]]
        assert gathered["done"].tolist() == [True, True, False]
        assert gathered["done"].dtype == torch.bool
        expected = torch.tensor([[1.1, 1.1], [2.1, 2.1], [2.1, 2.1]], dtype=torch.bfloat16)
        assert torch.equal(gathered["half"], expected)
        assert gathered["text"] == ["1.0", "2.0", "2.1"]
        assert seen[rank]["empty"]["ids"].shape == (0, 3)


def test_ranks_with_different_columns_are_told_so_alike(seen):
    messages = {result["differing"] for result in seen}
    assert len(messages) == 1
    assert "DataError: rank 1 of the group has columns {'c1'" in messages.pop()


def test_a_group_joins_uneven_and_empty_shards_in_rank_order(seen):
    for rank in range(WORLD):
        for rows, sizes in ((0, [0, 0, 0]), (2, [1, 1, 0]), (7, [3, 2, 2])):
            assert seen[rank]["doubled"][rows] == (
                sizes,
                [[2 * row] for row in range(rows)],
                [f"{row}!" for row in range(rows)],
            )


def test_a_failure_on_one_rank_is_raised_on_all(seen):
    assert [result["ours"] for result in seen] == ["DataError: bad row among 1"] * WORLD
    told = "WorkerError: fail failed on rank 1: ValueError: odd"
    assert [result["theirs"] for result in seen] == [told, "own odd", told]
