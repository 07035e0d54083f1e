"""Worker groups in one process, and ranks by named coordinates."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aligner.config import ParallelConfig
from aligner.distributed import worker_groups
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.named_sharding import MODEL_AXES, NamedSharding, layout_of
from aligner.distributed.workers import LocalCluster, LocalWorkerGroup, run_on_all, to_host
from aligner.errors import ConfigError, LayoutError, WorkerError

PARALLEL = SimpleNamespace(config=ParallelConfig(), rank=0, world_size=1, dp_rank=0, dp_size=1)


class Doubler:
    def __init__(self, parallel, factor=2):
        if factor == 0:
            raise ConfigError("factor=0")
        self.factor = factor
        self.closed = False

    def apply(self, data, offset):
        return BatchedDataDict({"y": data["x"] * self.factor + offset})

    def close(self):
        self.closed = True


def test_a_group_from_its_start_to_its_end():
    group = LocalWorkerGroup(Doubler(PARALLEL), PARALLEL)
    data = BatchedDataDict({"x": torch.tensor([1, 2, 3])})
    axes = {"replicate_on_axes": MODEL_AXES, "output_is_replicated": MODEL_AXES}
    shards, options = data.shard_by_batch_size(1), {"common_kwargs": {"offset": 1}}
    future = group.run_all_workers_sharded_data(
        "apply", shards, ["data_parallel"], **axes, **options
    )
    (result,) = group.get_all_worker_results(future)
    assert result["y"].tolist() == [3, 5, 7]
    name = f"{Doubler.__module__}.Doubler"
    group = LocalCluster(PARALLEL).start_workers(name, "doubler", factor=3)
    assert group.worker.factor == 3
    assert group.sharding_annotations.size == 1
    with pytest.raises(ConfigError) as caught:
        LocalCluster(PARALLEL).start_workers(name, "doubler", factor=0)
    assert "while starting doubler on rank 0" in caught.value.__notes__
    group = LocalWorkerGroup(Doubler(PARALLEL), PARALLEL)
    assert group.shutdown(cleanup_method="close")
    assert group.worker.closed
    assert run_on_all(group, Doubler.close) == [None]


@pytest.mark.integration
def test_what_needs_ray_is_published_here_and_imports_it_later():
    code = "import sys, aligner.distributed.worker_groups; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("RayWorkerGroup", "RayWorkerBuilder", "MultiWorkerFuture"):
        assert getattr(worker_groups, name).__module__ == "aligner.distributed.worker_groups"
    with pytest.raises(AttributeError, match="RayWorkers"):
        _ = worker_groups.RayWorkers


def test_shard_counts_and_results():
    group = LocalWorkerGroup(Doubler(PARALLEL), PARALLEL)
    with pytest.raises(WorkerError, match="2 shards for 1"):
        group.run_all_workers_sharded_data("apply", [1, 2], ["data_parallel"], [], [])
    with pytest.raises(WorkerError, match=r"\['tensor_parallel'\] must be"):
        group.run_all_workers_sharded_data("apply", [1], ["tensor_parallel"], [], [])
    with pytest.raises(WorkerError, match=r"other axes \['x'\]"):
        group.run_all_workers_sharded_data("apply", [1], ["data_parallel"], ["x"], [])
    sent = to_host(BatchedDataDict({"x": torch.ones(2, requires_grad=True), "y": [torch.ones(1)]}))
    assert isinstance(sent, BatchedDataDict)
    assert not sent["x"].requires_grad
    assert sent["y"][0].device.type == "cpu"
    assert to_host({"loss": 0.5}) == {"loss": 0.5}


SCRIPT = """
from aligner.distributed.worker_groups import RayWorkerGroup

class Front:
    def __del__(self):
        self.worker_group.shutdown()

front = Front()
front.worker_group = RayWorkerGroup.__new__(RayWorkerGroup)
"""


@pytest.mark.integration
def test_a_front_that_is_collected_while_python_ends_says_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "Exception ignored" in done.stderr) == (0, False), done.stderr


def sharding():
    # pp, dp, tp = 2, 2, 2
    return NamedSharding(np.arange(8).reshape(2, 2, 2), ["pp", "dp", "tp"])


def test_ranks_by_their_coordinates():
    s = sharding()
    assert s.shape == {"pp": 2, "dp": 2, "tp": 2}
    assert s.get_axis_size("dp") == 2
    assert (s.ndim, s.size, s.names) == (3, 8, ["pp", "dp", "tp"])
    for rank in range(8):
        assert s.get_ranks(**s.get_worker_coords(rank)) == rank
    assert s.get_worker_coords(5) == {"pp": 1, "dp": 0, "tp": 1}
    s.layout[0, 0, 0] = 99
    assert s.get_ranks(pp=0, dp=0, tp=0) == 0
    assert sharding().get_ranks(dp=1) == NamedSharding([[2, 3], [6, 7]], ["pp", "tp"])
    assert sharding().get_ranks_by_coord(dp=1) == [2, 3, 6, 7]
    assert sharding().get_ranks_by_coord(pp=0, tp=1) == [1, 3]


def test_bad_layouts_unknown_axes_and_megatrons_order():
    for layout, names, words in (
        ([[0, 1]], ["a"], r"2 axes.*got \['a'\]"),
        ([[0, 1]], ["a", "a"], "must differ"),
        ([0, 0], ["a"], "once"),
        ([0.5, 1.0], ["a"], "integer"),
    ):
        with pytest.raises(LayoutError, match=words):
            NamedSharding(layout, names)
    with pytest.raises(LayoutError, match="unknown axis 'cp'"):
        sharding().get_axis_size("cp")
    with pytest.raises(LayoutError, match=r"dp=2 is outside 0\.\.1"):
        sharding().get_ranks(dp=2)
    with pytest.raises(LayoutError, match="rank 8"):
        sharding().get_worker_coords(8)
    layout = layout_of(pipeline=2, data=2, context=1, tensor=2)
    assert layout.get_ranks_by_coord(pipeline_parallel=0, data_parallel=1) == [2, 3]
    assert layout.get_ranks_by_coord(pipeline_parallel=1, data_parallel=0) == [4, 5]
