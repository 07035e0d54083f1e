"""A group of workers that are actors of a Ray cluster.

The driver hands a group one shard of data per coordinate of the sharded axes and gets one result
per coordinate back. Data go through Ray's object store once, however many workers read them.

    driver   shard 0 ──► worker 0, worker 1 (its tensor-parallel peer)  ──► result of worker 0
             shard 1 ──► worker 2, worker 3                             ──► result of worker 2

The workers of a training group share a torch.distributed world of their own.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from aligner.config.layout import ParallelConfig
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import SlicedDataDict
from aligner.distributed.interfaces import WorkerFuture
from aligner.distributed.named_sharding import NamedSharding
from aligner.distributed.ray.bundles import Bundle, Room
from aligner.distributed.ray.calls import WorkerHandle, wait_for
from aligner.distributed.ray.worker import Seat, TorchWorld, WorkerProcess
from aligner.distributed.step import current_step
from aligner.distributed.workers import LocalCluster
from aligner.errors import AlignerError, WorkerError

if TYPE_CHECKING:
    from ray import ObjectRef

__all__ = ["LocalCluster", "MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"]

_CLEANUP_S = 10.0  # for a worker's cleanup method, and for its process to be gone
# Prefixes of the driver's environment variables that workers see on other nodes too.
_FORWARDED = (
    *("ALIGNER_", "CUDA_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "NVTE_", "OMP_"),
    *("PYTORCH_", "TOKENIZERS_", "TORCH_", "VLLM_"),
)
# Ray decides which GPUs a worker sees; where they stand differs from node to node.
_NOT_FORWARDED = {"CUDA_VISIBLE_DEVICES"}


class RayWorkerBuilder:
    """Recipe for a worker: its class, which may be a dotted path, and its arguments.

    Where ``worker_sharding_annotations`` is among them, the workers of a group form a
    torch.distributed world of that layout.
    """

    def __init__(self, worker_class: str | type, *args: Any, **kwargs: Any) -> None:
        if isinstance(worker_class, type):
            worker_class = f"{worker_class.__module__}.{worker_class.__qualname__}"
        self.worker_class = worker_class
        self.args, self.kwargs = args, kwargs

    @property
    def layout(self) -> ParallelConfig | None:
        """Layout of the workers' world; None: they have none."""
        places: NamedSharding | None = self.kwargs.get("worker_sharding_annotations")
        if places is None:
            return None
        sizes = places.shape
        return ParallelConfig(
            tensor=sizes.get("tensor_parallel", 1),
            pipeline=sizes.get("pipeline_parallel", 1),
            context=sizes.get("context_parallel", 1),
        )


class MultiWorkerFuture(list["ObjectRef"]):
    """A method call that was started on many workers: the list of their results to come.

    ``ray.get`` of it gives the results of all; it raises `Failure` where a worker raised.

    Args:
        method_name: what was called.
        calls: of every worker that was called, its result to come and its seat.
        returned: positions in ``calls`` of the results that `get_results` returns, in order.
        timeout_s: longest wait for an answer.
    """

    def __init__(
        self,
        method_name: str,
        calls: "Sequence[tuple[ObjectRef, Seat]]",
        returned: Sequence[int],
        timeout_s: float,
    ) -> None:
        super().__init__(reference for reference, _ in calls)
        self.method_name, self.calls = method_name, calls
        self.returned, self.timeout_s = returned, timeout_s

    def get_results(self) -> list[Any]:
        """Wait for all workers; one result per group of workers with the same output.

        Raises:
            WorkerDiedError: a worker's process ended.
            WorkerError: a worker raised what is not an `AlignerError`, or did not answer in time.
            AlignerError: what a worker raised, of its own type.
        """
        results = wait_for(self.calls, self.method_name, self.timeout_s)
        return [results[position] for position in self.returned]


class RayWorkerGroup:
    """Workers on bundles of a `RayVirtualCluster`."""

    def __init__(
        self,
        cluster: Room,
        worker_builder: RayWorkerBuilder,
        name_prefix: str,
        workers_per_node: int | Sequence[int] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        parallel: ParallelConfig | None = None,
        seed: int = 1234,
        python_executable: str | None = None,
    ) -> None:
        """Start one worker on each bundle.

        The workers are constructed while the driver goes on; what goes wrong there is raised by
        `wait_until_started` or the first call.

        Args:
            cluster: where.
            worker_builder: what.
            name_prefix: role in messages and log names.
            workers_per_node: number of each node's bundles that are used (or one per node);
                default all.
            sharding_annotations: place of every worker; default only data parallel. Workers sit
                on as many bundles as it has ranks, the first ones.
            env_vars: further environment of the workers, there before they import anything.
            parallel: the workers form a torch.distributed world with these model-parallel sizes
                and are constructed with ``parallel=ParallelState``; default that of the builder.
            seed: of such a world.
            python_executable: interpreter of the workers; default that of the Ray node. It needs
                the same version of Ray; aligner's source is on its path.
        """
        bundles = cluster.bundles_for(workers_per_node)
        if sharding_annotations is None:
            sharding_annotations = NamedSharding(np.arange(len(bundles)), ["data_parallel"])
        if sharding_annotations.size > len(bundles):
            raise WorkerError(
                f"{name_prefix} needs {sharding_annotations.size} workers, but the cluster "
                f"{cluster.name} has room for {len(bundles)}; make it larger, or raise "
                "workers_per_node"
            )
        self.cluster, self.name_prefix = cluster, name_prefix
        self.sharding_annotations = sharding_annotations
        self._timeout_s = cluster.timeout_s
        self.is_whole = True
        self._actors: list[Any] = []
        self._seats: list[Seat] = []
        self._starting: list[Any] = []
        used = bundles[: sharding_annotations.size]
        try:
            self._start_processes(used, {**_forwarded(), **(env_vars or {})}, python_executable)
            self._start_workers(used, worker_builder, parallel or worker_builder.layout, seed)
        except BaseException:
            self.is_whole = False
            self.shutdown()
            raise

    # Calls ------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerHandle]:
        """The workers by rank, to be called one by one; see `WorkerHandle`."""
        if self._starting:
            self.wait_until_started()
        return [WorkerHandle(*each) for each in zip(self._actors, self._seats, strict=True)]

    @property
    def is_alive(self) -> bool:
        """True if `shutdown` has not been called."""
        return bool(self._actors)

    def wait_until_started(self) -> None:
        """Wait until every worker has been constructed; raises what one of them raised."""
        starting, self._starting = self._starting, []
        with self._breaking():
            wait_for(starting, f"{self.name_prefix}, starting", self._timeout_s)

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> MultiWorkerFuture:
        """Call a method with the same arguments on every worker; every worker's result."""
        common = self._arguments(kwargs)
        calls = [self._call(rank, method_name, common) for rank in range(len(self._actors))]
        return self._future(method_name, calls, range(len(calls)))

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int = 0, **kwargs: Any
    ) -> MultiWorkerFuture:
        """Call a method on one worker."""
        call = self._call(worker_idx, method_name, self._arguments(kwargs))
        return self._future(method_name, [call], [0])

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        data: Sequence[SlicedDataDict],
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str],
        output_is_replicated: Sequence[str],
        common_kwargs: Mapping[str, Any] | None = None,
    ) -> MultiWorkerFuture:
        """Call a method with ``data=`` the shard of each worker's coordinates.

        Args:
            method_name: the method.
            data: shards by coordinate of the sharded axis; nested for several axes, in their order.
            in_sharded_axes: axes along which workers get different data.
            replicate_on_axes: axes along which workers get the same data. Along an axis that is in
                neither, only the workers at coordinate 0 are called.
            output_is_replicated: axes along which results are the same; that at coordinate 0 is
                returned.
            common_kwargs: the same for every worker.

        Returns:
            One result per coordinate of the other axes, outermost axis first.
        """
        sizes = self.sharding_annotations.shape
        for name in (*in_sharded_axes, *replicate_on_axes, *output_is_replicated):
            if name not in sizes:
                raise WorkerError(f"{method_name}: no axis {name!r}; the axes are {list(sizes)}")
        _check_shards(method_name, data, [sizes[name] for name in in_sharded_axes])
        common, shards = self._arguments(common_kwargs or {}), {}
        free = set(sizes) - set(in_sharded_axes) - set(replicate_on_axes)
        calls: list[Any] = []
        returned: list[int] = []
        for rank in np.ravel(self.sharding_annotations.layout).tolist():
            place = self.sharding_annotations.get_worker_coords(rank)
            if any(place[axis] for axis in free):
                continue
            index = tuple(place[axis] for axis in in_sharded_axes)
            if index not in shards:
                shards[index] = self._put(_at(data, index))
            if not any(place[axis] for axis in output_is_replicated):
                returned.append(len(calls))
            calls.append(self._call(rank, method_name, common, shards[index]))
        return self._future(method_name, calls, returned)

    def get_all_worker_results(self, future: WorkerFuture) -> list[Any]:
        """Wait for a call; see `MultiWorkerFuture.get_results`."""
        with self._breaking():
            return future.get_results()

    def recover(self) -> bool:
        """See `WorkerGroup.recover`. A worker answers its calls in their order."""
        calls = [
            (actor.seat.remote(), seat)
            for actor, seat in zip(self._actors, self._seats, strict=True)
        ]
        try:
            wait_for(calls, f"{self.name_prefix}, after a failure", self._timeout_s)
        except WorkerError:
            return False
        self.is_whole = bool(calls)
        return self.is_whole

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """End the processes, calling ``cleanup_method`` on each first; whether that went well.

        A group in which a call has failed is ended without it: its workers may not answer.
        """
        if sys.is_finalizing():  # nothing can be imported any more; Ray ends the workers itself
            return False
        import ray

        if not ray.is_initialized():  # the workers ended with the connection
            self._actors, self._seats, self._starting = [], [], []
            return True
        went_well = True
        if cleanup_method is not None and self.is_whole and not self._starting and self._actors:
            future = self.run_all_workers_single_data(cleanup_method)
            future.timeout_s = _CLEANUP_S
            try:
                future.get_results()
            except AlignerError:
                went_well = False
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        _wait_until_gone(self._seats)
        self._actors, self._seats, self._starting = [], [], []
        return went_well

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Mark the group as failed if the block raises: its workers may wait for one another."""
        try:
            yield
        except AlignerError:
            self.is_whole = False
            raise

    def _put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def _arguments(self, kwargs: Mapping[str, Any]) -> Any:
        """A reference to the arguments that all workers are given; none go with the call."""
        return self._put(dict(kwargs)) if kwargs else {}

    def _call(self, rank: int, method_name: str, *arguments: Any) -> Any:
        if self._starting:
            self.wait_until_started()
        reference = self._actors[rank].call.remote(method_name, current_step(), *arguments)
        return reference, self._seats[rank]

    def _future(
        self, method_name: str, calls: list[Any], returned: Sequence[int]
    ) -> MultiWorkerFuture:
        what = f"{self.name_prefix}.{method_name}"
        return MultiWorkerFuture(what, calls, returned, self._timeout_s)

    # Starting ---------------------------------------------------------------------------------

    def _start_processes(
        self,
        bundles: Sequence[Bundle],
        environment: Mapping[str, str],
        python_executable: str | None,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = dict(self.cluster.worker_resources)
        if python_executable is not None:
            path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            options["runtime_env"] = {
                "py_executable": python_executable,
                "env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            }
        process, starting = ray.remote(WorkerProcess), []
        for rank, bundle in enumerate(bundles):
            log = str(self.cluster.log_dir / f"{self.name_prefix}-{rank}.log")
            strategy = PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
            actor = process.options(scheduling_strategy=strategy, **options).remote(
                self.name_prefix,
                rank,
                log,
                os.getcwd(),
                environment,
                sum(other.node == bundle.node for other in bundles),
            )
            self._actors.append(actor)
            seat = Seat(self.name_prefix, rank, "not known yet", "", 0, log)
            starting.append((actor.seat.remote(), seat))
        self._seats = wait_for(starting, f"{self.name_prefix}, starting", self._timeout_s)

    def _start_workers(
        self,
        bundles: Sequence[Bundle],
        builder: RayWorkerBuilder,
        parallel: ParallelConfig | None,
        seed: int,
    ) -> None:
        what = f"{self.name_prefix}, starting"
        world = None
        if parallel is not None:
            first = [(self._actors[0].free_port.remote(), self._seats[0])]
            ((host, port),) = wait_for(first, what, self._timeout_s)
            world = TorchWorld(parallel, seed, self._timeout_s, len(self._actors), host, port)
        arguments = self._put((builder.args, builder.kwargs))
        for rank, (actor, seat) in enumerate(zip(self._actors, self._seats, strict=True)):
            node = [
                other for other, bundle in enumerate(bundles) if bundle.node == bundles[rank].node
            ]
            place = {
                "RANK": str(rank),
                # A worker on a GPU sees only its own.
                "LOCAL_RANK": "0" if self.cluster.use_gpus else str(node.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(node)),
                accelerator.SHARED_DEVICE: "1" if self.cluster.shares_bundles else "0",
            }
            start = actor.start.remote(builder.worker_class, arguments, place, world)
            self._starting.append((start, seat))


def _forwarded() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and name not in _NOT_FORWARDED
    }


def _check_shards(method_name: str, data: Any, sizes: Sequence[int]) -> None:
    """Refuse a number of shards that is not the number of coordinates."""
    if not sizes:
        return
    if len(data) != sizes[0]:
        raise WorkerError(f"{method_name}: {len(data)} shards for {sizes[0]} coordinates")
    for part in data:
        _check_shards(method_name, part, sizes[1:])


def _at(data: Any, index: tuple[int, ...]) -> Any:
    for coordinate in index:
        data = data[coordinate]
    return data


def _wait_until_gone(seats: Sequence[Seat]) -> None:
    """Wait until the workers on this machine have ended: others may need their memory."""
    host = os.uname().nodename
    deadline = time.monotonic() + _CLEANUP_S
    for seat in seats:
        while seat.host == host and psutil.pid_exists(seat.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
