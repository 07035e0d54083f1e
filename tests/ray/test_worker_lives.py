"""The life of a group of workers on Ray.

1. Who dies is named with the last lines of its log, who is late with its name, soon.
2. A training group shares a world of its own; a group may have an interpreter of its own.
3. Room is counted, refused in words, and given back.
"""

import os

import pytest
from ray_workers import TELLER, teller_on

from aligner.config import ParallelConfig
from aligner.distributed.named_sharding import NamedSharding
from aligner.distributed.virtual_cluster import RayVirtualCluster
from aligner.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from aligner.errors import DataError, WorkerDiedError, WorkerError

pytestmark = pytest.mark.ray
PAIR = NamedSharding([0, 1], ["data_parallel"])


@pytest.fixture
def cluster(ray):
    cluster = RayVirtualCluster([4], max_colocated_worker_groups=2, timeout_s=280)
    yield cluster
    cluster.shutdown()


def test_threads_are_the_cores_shared_out(cluster, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    group = RayWorkerGroup(cluster, RayWorkerBuilder(TELLER), "pair", sharding_annotations=PAIR)
    cores = len(os.sched_getaffinity(0))
    (place, _) = group.run_all_workers_single_data("place").get_results()
    assert place["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    group.shutdown()


def test_who_is_late_and_who_dies_is_named(cluster):
    group = teller_on(cluster)
    call = group.run_all_workers_single_data("sleep", ranks=[1, 3], seconds=4)
    call.timeout_s = 2
    with pytest.raises(WorkerError, match=r"teller\.sleep: no answer within .*=2 s") as caught:
        group.get_all_worker_results(call)
    assert "teller rank 1 (" in str(caught.value)
    assert "teller rank 3 (" in str(caught.value)
    assert "teller rank 0 (" not in str(caught.value)

    call = group.run_single_worker_single_data("die", worker_idx=2)
    with pytest.raises(WorkerDiedError) as caught:
        group.get_all_worker_results(call)
    message = str(caught.value)
    assert "teller rank 2 (node " in message
    assert "died in teller.die" in message
    assert "these are my last words" in message
    with pytest.raises(WorkerDiedError, match="teller rank 2"):
        group.run_all_workers_single_data("place").get_results()
    assert not group.recover()
    assert not group.is_healthy
    assert group.shutdown(cleanup_method="nobody is asked any more")


def test_cleanup_runs_on_each_worker_before_it_ends(cluster, tmp_path):
    builder = RayWorkerBuilder("ray_workers.Closing", folder=tmp_path)
    group = RayWorkerGroup(cluster, builder, "closing", sharding_annotations=PAIR)
    group.wait_until_started()
    assert group.shutdown(cleanup_method="shutdown")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_an_interpreter_of_its_own(cluster, python_with_mark):
    group = cluster.start_workers(
        TELLER, "other", layout=PAIR, python_executable=python_with_mark, factor=2
    )
    places = group.run_all_workers_single_data("place").get_results()
    assert [place["ANOTHER_PYTHON"] for place in places] == ["1", "1"]


def test_construction_errors_are_the_workers_own(cluster):
    builder = RayWorkerBuilder(TELLER, fail=True)
    one = NamedSharding([0], ["data_parallel"])
    group = RayWorkerGroup(cluster, builder, "failing", sharding_annotations=one)
    with pytest.raises(DataError, match="column x is missing"):
        group.run_all_workers_single_data("place")
    group.shutdown()


@pytest.mark.ray_heavy
def test_a_training_group_has_its_own_world_and_its_dead_are_found(ray):
    pairs = ParallelConfig(tensor=2)
    cluster = RayVirtualCluster([2], max_colocated_worker_groups=1, parallel=pairs, timeout_s=280)
    try:
        group = cluster.start_workers("ray_workers.Summer", "summer")
        assert group.run_all_workers_single_data("sum_of_ranks").get_results() == [1.0, 1.0]
        assert group.run_all_workers_single_data("place").get_results() == [(0, 0), (0, 1)]
        with pytest.raises(WorkerError, match="max_colocated_worker_groups"):
            cluster.start_workers("ray_workers.Summer", "second")
        # Its peer meets a broken link; the death behind it is what is told.
        call = group.run_all_workers_single_data("wait_for_the_dead", dying=1)
        with pytest.raises(WorkerDiedError, match="summer rank 1"):
            group.get_all_worker_results(call)
    finally:
        cluster.shutdown()


def test_no_room_is_said_in_numbers(ray, monkeypatch):
    monkeypatch.setattr("aligner.distributed.virtual_cluster._PLACING_S", 1)
    cluster = RayVirtualCluster([3])
    with pytest.raises(WorkerError, match=r"no room for policy: .*\[2\] bundles.*1 nodes"):
        RayVirtualCluster([2], name="policy")
    with pytest.raises(WorkerError, match="cpus_per_worker"):
        RayVirtualCluster([1, 1])  # two nodes, and there is one
    assert (cluster.world_size(), cluster.node_count()) == (3, 1)
    assert len(cluster.get_placement_groups()) == 1
    cluster.shutdown()
    RayVirtualCluster([4]).shutdown()
