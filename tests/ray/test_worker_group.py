"""Calls of a group of workers on Ray.

1. Every call reaches the workers it should, with their shard, and gives one result per coordinate
   of the axes that are not replicated, in order. Data are put into the object store once.
2. A worker's error comes back as itself; others with the worker's name and trace.
"""

import os
import time

import pytest
from ray_workers import teller_on

from aligner.distributed.virtual_cluster import RayVirtualCluster
from aligner.errors import DataError, MissingPackageError, WorkerError, training_step

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def group(own_ray):
    """Four workers, two data-parallel pairs, that no test harms."""
    cluster = RayVirtualCluster([2], max_colocated_worker_groups=1, timeout_s=280)
    with pytest.raises(WorkerError, match=r"needs 4 workers, but .* has room for 2"):
        teller_on(cluster)
    cluster.shutdown()
    cluster = RayVirtualCluster([4], max_colocated_worker_groups=2, timeout_s=280)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
        environment.setenv("CUDA_VISIBLE_DEVICES", "6,7")
        group = teller_on(cluster)
    yield group
    cluster.shutdown()


def test_calls_reach_whom_they_should(group, own_ray, monkeypatch):
    run, results = group.run_all_workers_sharded_data, group.get_all_worker_results
    shards = [[0, 1], [2, 3]]  # a worker that is sent tensors imports torch first

    puts = []
    real_put = own_ray.put
    monkeypatch.setattr(own_ray, "put", lambda value: puts.append(value) or real_put(value))
    pairs = run(
        "echo",
        shards,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        output_is_replicated=["tensor_parallel"],
        common_kwargs={"plus": 1},
    )
    assert results(pairs) == [(0, [1, 11]), (2, [21, 31])]
    assert len(puts) == 3  # the arguments and two shards, for four workers

    everyone = run("echo", shards, ["data_parallel"], ["tensor_parallel"], [])
    assert [rank for rank, _ in results(everyone)] == [0, 1, 2, 3]
    first_of_each = run("echo", shards, ["data_parallel"], [], [])  # tensor 1 is not called
    assert results(first_of_each) == [(0, [0, 10]), (2, [20, 30])]
    nested = [[shards[0], shards[1]], [shards[1], shards[0]]]
    both = run("echo", nested, ["data_parallel", "tensor_parallel"], [], [])
    assert results(both) == [(0, [0, 10]), (1, [20, 30]), (2, [20, 30]), (3, [0, 10])]

    same = group.run_all_workers_single_data("echo", plus=3)
    assert [rank for rank, _ in same.get_results()] == [0, 1, 2, 3]
    assert group.run_single_worker_single_data("echo", worker_idx=2).get_results() == [(2, None)]
    with training_step(7):
        assert group.run_single_worker_single_data("step").get_results() == [7]
    with pytest.raises(WorkerError, match="3 shards for 2"):
        run("echo", [1, 2, 3], ["data_parallel"], [], [])
    with pytest.raises(WorkerError, match="no axis 'x'"):
        run("echo", shards, ["x"], [], [])


def test_places_threads_and_folder(group):
    places = group.run_all_workers_single_data("place").get_results()
    assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {"4"}
    assert {place["folder"] for place in places} == {os.getcwd()}
    assert {place["OMP_NUM_THREADS"] for place in places} == {os.environ["OMP_NUM_THREADS"]}
    assert group.cluster.worker_resources["num_cpus"] == 0.5
    assert {place["ALIGNER_SHARED_DEVICE"] for place in places} == {"1"}  # two groups on a bundle
    # What GPU libraries read goes everywhere, but for the choice of GPUs, which is Ray's.
    assert {place["PYTORCH_ALLOC_CONF"] for place in places} == {"max_split_size_mb:512"}
    assert "6,7" not in {place["CUDA_VISIBLE_DEVICES"] for place in places}


def test_after_a_failure_all_are_waited_for(group):
    group.run_all_workers_single_data("sleep", ranks=[0], seconds=2)
    failed = group.run_single_worker_single_data("refuse", worker_idx=1, error=DataError("x"))
    began = time.monotonic()
    with pytest.raises(DataError):
        group.get_all_worker_results(failed)
    assert not group.is_healthy
    assert group.recover()
    assert time.monotonic() - began > 1
    assert group.is_healthy


def test_an_error_comes_back_as_itself_or_with_its_trace(group):
    future = group.run_all_workers_single_data("refuse", error=DataError("row 7 is empty"))
    with pytest.raises(DataError, match="row 7 is empty") as caught:
        group.get_all_worker_results(future)
    assert "teller rank" in caught.value.__notes__[0]
    future = group.run_single_worker_single_data("need", extra="gguf")
    said = 'x.gguf needs gguf, which is not installed. Run: pip install "aligner[gguf]"'
    with pytest.raises(MissingPackageError) as caught:
        future.get_results()
    assert str(caught.value) == said
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"teller rank 1 .* KeyError: 'nowhere'.*\.log") as caught:
        group.run_single_worker_single_data("stumble", worker_idx=1).get_results()
    assert time.monotonic() - started < 4
    assert "in stumble" in caught.value.__notes__[0]
    future = group.run_single_worker_single_data("refuse", error=ValueError("x"))
    with pytest.raises(WorkerError, match="ValueError: x"):
        future.get_results()
