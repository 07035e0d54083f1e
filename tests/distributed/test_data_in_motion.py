"""Three processes exchange batches of different sizes, none included."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from aligner.config import ParallelConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.named_sharding import MODEL_AXES
from aligner.distributed.workers import LocalWorkerGroup
from aligner.errors import AlignerError, DataError
from aligner.parallel.collectives import gather_objects

WORLD = 3


class Worker:
    """Doubles; fails on a rank when told to, with an exception that cannot be pickled."""

    def __init__(self, rank):
        self.rank = rank

    def double(self, data):
        return BatchedDataDict({"y": data["x"] * 2, "names": [f"{n}!" for n in data["names"]]})

    def fail(self, data, on, ours):
        if self.rank == on:
            if ours:
                raise DataError(f"bad row among {data.size}")
            error = ValueError("odd")
            error.lock = torch.Generator()  # stands for whatever an exception may hold
            error.call = lambda: None
            raise error
        return data


def jagged(rank):
    """Rank r brings r rows, r + 1 wide, of types that are easy to get wrong."""
    return BatchedDataDict(
        {
            "ids": torch.full((rank, rank + 1), 10 * rank),
            "half": torch.full((rank, 2), 0.1 + rank, dtype=torch.bfloat16),
            "done": torch.arange(rank) % 2 == 0,
            "text": [f"{rank}.{i}" for i in range(rank)],
        }
    )


def message_of(call):
    with pytest.raises((AlignerError, ValueError)) as caught:
        call()
    return f"{caught.typename}: {caught.value}"


def exchanged():
    """What every rank saw."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, group = dist.get_rank(), dist.group.WORLD
    sizes = {"world_size": WORLD, "dp_size": WORLD, "dp_rank": rank, "dp_group": group}
    parallel = SimpleNamespace(config=ParallelConfig(), rank=rank, **sizes)
    workers = LocalWorkerGroup(Worker(rank), parallel)

    def call(method, data, **kwargs):
        shards = data.shard_by_batch_size(WORLD, allow_uneven_shards=True)
        axes = (["data_parallel"], MODEL_AXES, MODEL_AXES)
        future = workers.run_all_workers_sharded_data(method, shards, *axes, common_kwargs=kwargs)
        return workers.get_all_worker_results(future)

    def doubled(rows):
        data = BatchedDataDict(
            {"x": torch.arange(rows)[:, None], "names": [str(row) for row in range(rows)]}
        )
        results = call("double", data)
        joined = BatchedDataDict.from_batches(results)
        return [len(result["y"]) for result in results], joined["y"].tolist(), joined["names"]

    data = BatchedDataDict({"x": torch.arange(5)})
    seen = {
        "gathered": jagged(rank).all_gather(group).get_dict(),
        "empty": BatchedDataDict({"ids": torch.zeros(0, 3)}).all_gather(group).get_dict(),
        "differing": message_of(lambda: BatchedDataDict({f"c{rank}": [1]}).all_gather(group)),
        "doubled": {rows: doubled(rows) for rows in (0, 2, 7)},
        "ours": message_of(lambda: call("fail", data, on=2, ours=True)),
        "theirs": message_of(lambda: call("fail", data, on=1, ours=False)),
    }
    return gather_objects(seen)


@pytest.fixture(scope="module")
def seen():
    return on_ranks(WORLD, exchanged, timeout_s=180)


def test_all_gather_joins_rows_in_rank_order_on_every_rank(seen):
    expected = torch.tensor([[1.1, 1.1], [2.1, 2.1], [2.1, 2.1]], dtype=torch.bfloat16)
    for one in seen:
        gathered = one["gathered"]
        assert gathered["ids"].tolist() == [[10, 10, 0], [20, 20, 20], [20, 20, 20]]
        assert gathered["done"].tolist() == [True, True, False]
        assert gathered["done"].dtype == torch.bool
        assert torch.equal(gathered["half"], expected)
        assert gathered["text"] == ["1.0", "2.0", "2.1"]
        assert one["empty"]["ids"].shape == (0, 3)


def test_a_group_joins_uneven_and_empty_shards_in_rank_order(seen):
    for one in seen:
        for rows, sizes in ((0, [0, 0, 0]), (2, [1, 1, 0]), (7, [3, 2, 2])):
            names = [f"{row}!" for row in range(rows)]
            assert one["doubled"][rows] == (sizes, [[2 * row] for row in range(rows)], names)


def test_a_failure_on_one_rank_is_raised_on_all(seen):
    assert [one["ours"] for one in seen] == ["DataError: bad row among 1"] * WORLD
    told = "WorkerError: fail failed on rank 1: ValueError: odd"
    assert [one["theirs"] for one in seen] == [told, "ValueError: odd", told]
    (message,) = {one["differing"] for one in seen}
    assert "DataError: rank 1 of the group has columns {'c1'" in message
