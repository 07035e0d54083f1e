"""Groups of workers that are actors of a Ray cluster.

The driver puts one shard per data-parallel coordinate into Ray's object store, from which actors
read. The workers of a training group form a torch.distributed world.
"""

import contextlib
import functools
import operator
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil

from aligner.config.layout import ParallelConfig
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import SlicedDataDict
from aligner.distributed.interfaces import WorkerFuture
from aligner.distributed.named_sharding import NamedSharding
from aligner.distributed.ray.calls import WorkerHandle, wait_for
from aligner.distributed.ray.worker import TorchWorld, WorkerIdentity, WorkerProcess
from aligner.distributed.workers import LocalCluster
from aligner.errors import AlignerError, WorkerError, current_step

if TYPE_CHECKING:
    from ray import ObjectRef

__all__ = ["LocalCluster", "MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"]

_CLEANUP_S = 10.0  # time limit of a worker's cleanup method, and of the end of its process
# Prefixes of the driver's environment variables that are set on every node.
_FORWARDED = (
    *("ALIGNER_", "CUDA_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "NVTE_", "OMP_"),
    *("PYTORCH_", "TOKENIZERS_", "TORCH_", "VLLM_"),
)
# Ray selects the GPUs of a worker, and the selection differs between nodes.
_NOT_FORWARDED = {"CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class Bundle:
    """Reserved CPUs and GPUs on a node, for one worker of each worker group."""

    group: Any  # Ray's placement group
    index: int  # in the placement group
    node: str  # Ray's id of the node


class BundleCluster(Protocol):
    """Interface of `RayVirtualCluster` for worker groups. Avoids a circular import."""

    name: str
    timeout_s: float
    log_dir: Path
    use_gpus: bool
    shares_bundles: bool
    worker_resources: dict[str, float]

    def bundles_for(self, workers_per_node: int | Sequence[int] | None = None) -> list[Bundle]:
        """Return the bundles on each node. See `RayVirtualCluster.bundles_for`."""


class RayWorkerBuilder:
    """A worker's class, or its dotted path, and the arguments of its constructor.

    With the keyword argument ``worker_sharding_annotations`` (`NamedSharding`), the workers of a
    group join one torch.distributed world with this layout.
    """

    def __init__(self, worker_class: str | type, *args: Any, **kwargs: Any) -> None:
        if isinstance(worker_class, type):
            worker_class = f"{worker_class.__module__}.{worker_class.__qualname__}"
        self.worker_class = worker_class
        self.args, self.kwargs = args, kwargs

    @property
    def layout(self) -> ParallelConfig | None:
        """Model-parallel sizes of the workers' torch.distributed world, or None without a world."""
        sharding: NamedSharding | None = self.kwargs.get("worker_sharding_annotations")
        if sharding is None:
            return None
        sizes = sharding.shape
        return ParallelConfig(
            tensor=sizes.get("tensor_parallel", 1),
            pipeline=sizes.get("pipeline_parallel", 1),
            context=sizes.get("context_parallel", 1),
        )


class MultiWorkerFuture(list["ObjectRef"]):
    """Results of a method call on several workers, as a list of Ray's references.

    ``ray.get`` of the list returns all results, or raises `WorkerFailure`. ``calls``: (reference,
    identity) of each worker. ``returned``: indices of the calls whose results are returned.
    """

    def __init__(
        self,
        method_name: str,
        calls: "Sequence[tuple[ObjectRef, WorkerIdentity]]",
        returned: Sequence[int],
        timeout_s: float,
    ) -> None:
        super().__init__(reference for reference, _ in calls)
        self.method_name, self.calls = method_name, calls
        self.returned, self.timeout_s = returned, timeout_s

    def get_results(self) -> list[Any]:
        """Wait for all workers and return their results, of replicated (equal) ones only the first.

        Raises:
            AlignerError: a worker raised this error. It is raised again with the same class.
            WorkerError: a worker raised another exception, or did not answer in time.
            WorkerDiedError: a worker's process ended.
        """
        results = wait_for(self.calls, self.method_name, self.timeout_s)
        return [results[position] for position in self.returned]


class RayWorkerGroup:
    """Workers on the bundles of a `RayVirtualCluster`. Implements the interface `WorkerGroup`."""

    def __init__(
        self,
        cluster: BundleCluster,
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
        """Start one worker on each bundle, without waiting until the workers are constructed.

        Errors of a constructor are raised by `wait_until_started` and by the first call.

        Args:
            cluster: cluster whose bundles the workers use.
            worker_builder: class and arguments of the workers.
            name_prefix: name of the role in messages and log names.
            workers_per_node: bundles to use on each node, one value or one per node. Default: all.
            sharding_annotations: ranks of the workers by axis. Default: all are data parallel.
            env_vars: additional environment variables, set before the workers import anything.
            parallel: model-parallel sizes of a torch.distributed world that the workers join. Each
                worker gets its `ParallelState` as argument ``parallel``. Default: the builder's
                layout.
            seed: seed of the workers' random generators if they join a world.
            python_executable: interpreter of the workers, with the same version of Ray.
        """
        bundles = cluster.bundles_for(workers_per_node)
        # Layout and bundles of the workers.
        if sharding_annotations is None:
            sharding_annotations = NamedSharding(np.arange(len(bundles)), ["data_parallel"])
        if sharding_annotations.size > len(bundles):
            raise WorkerError(
                f"{name_prefix} needs {sharding_annotations.size} workers, but the cluster "
                f"{cluster.name} has room for {len(bundles)}. Use a larger cluster, or raise "
                "workers_per_node"
            )
        self.cluster, self.name_prefix = cluster, name_prefix
        self.sharding_annotations, self.is_healthy = sharding_annotations, True
        self._timeout_s = cluster.timeout_s
        self._actors: list[Any] = []
        self._identities: list[WorkerIdentity] = []
        self._starting: list[Any] = []
        # Start the processes, then the workers in them.
        used = bundles[: sharding_annotations.size]
        try:
            environment = {
                name: value
                for name, value in os.environ.items()
                if name.startswith(_FORWARDED) and name not in _NOT_FORWARDED
            }
            self._start_processes(used, environment | dict(env_vars or {}), python_executable)
            self._start_workers(used, worker_builder, parallel or worker_builder.layout, seed)
        except BaseException:
            self.is_healthy = False
            self.shutdown()
            raise

    @property
    def workers(self) -> list[WorkerHandle]:
        """Handles of the workers in rank order."""
        self.wait_until_started()
        return list(map(WorkerHandle, self._actors, self._identities))

    @property
    def is_alive(self) -> bool:
        """True until `shutdown` is called."""
        return bool(self._actors)

    def wait_until_started(self) -> None:
        """Wait until every worker is constructed. Raises a worker's error."""
        starting, self._starting = self._starting, []
        if starting:
            with self._unhealthy_on_error():
                wait_for(starting, f"{self.name_prefix}, starting", self._timeout_s)

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> MultiWorkerFuture:
        """Start a call with the same arguments on every worker. The future returns all results."""
        ranks = range(len(self._actors))
        return self._start_call(method_name, kwargs, dict.fromkeys(ranks, ()), ranks)

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int = 0, **kwargs: Any
    ) -> MultiWorkerFuture:
        """Start a call on worker ``worker_idx``."""
        return self._start_call(method_name, kwargs, {worker_idx: ()}, [0])

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        data: Sequence[SlicedDataDict],
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str],
        output_is_replicated: Sequence[str],
        common_kwargs: Mapping[str, Any] | None = None,
    ) -> MultiWorkerFuture:
        """Start a call on each worker. Argument ``data`` is the shard for its coordinates.

        Args:
            method_name: name of the method.
            data: one shard per coordinate of the sharded axis. For several axes, nested lists.
            in_sharded_axes: axes along which workers get different shards.
            replicate_on_axes: axes along which workers get the same shard. Along axes in neither
                list, only the workers at coordinate 0 are called.
            output_is_replicated: axes along which only the result at coordinate 0 is returned.
            common_kwargs: arguments that are the same for every worker.
        """
        # Check the axes and the number of shards.
        sizes = self.sharding_annotations.shape
        for name in (*in_sharded_axes, *replicate_on_axes, *output_is_replicated):
            if name not in sizes:
                raise WorkerError(f"{method_name}: no axis {name!r}. The axes are {list(sizes)}")
        _check_shards(method_name, data, [sizes[name] for name in in_sharded_axes])
        # Select the workers to call: along unused axes only those at coordinate 0.
        unused_axes = set(sizes) - set(in_sharded_axes) - set(replicate_on_axes)
        stored_shards: dict[tuple[int, ...], Any] = {}  # each shard is stored once
        shards: dict[int, tuple[Any, ...]] = {}  # rank → (its shard,)
        returned: list[int] = []  # positions of the results to return, in the order of calls
        for rank in np.ravel(self.sharding_annotations.layout).tolist():
            coordinates = self.sharding_annotations.get_worker_coords(rank)
            if any(coordinates[axis] for axis in unused_axes):
                continue
            index = tuple(coordinates[axis] for axis in in_sharded_axes)
            if index not in stored_shards:
                shard = functools.reduce(operator.getitem, index, data)  # data[i][j]...
                stored_shards[index] = _put(shard)
            if not any(coordinates[axis] for axis in output_is_replicated):
                returned.append(len(shards))
            shards[rank] = (stored_shards[index],)
        return self._start_call(method_name, common_kwargs or {}, shards, returned)

    def get_all_worker_results(self, future: WorkerFuture) -> list[Any]:
        """Wait for a call and return the results of `MultiWorkerFuture.get_results`."""
        with self._unhealthy_on_error():
            return future.get_results()

    def recover(self) -> bool:
        """After a failed call, wait until the workers answer again. Return True if all do."""
        references = (actor.identity.remote() for actor in self._actors)
        calls = list(zip(references, self._identities, strict=True))
        try:
            wait_for(calls, f"{self.name_prefix}, after a failure", self._timeout_s)
        except WorkerError:
            return False
        self.is_healthy = bool(calls)
        return self.is_healthy

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Call ``cleanup_method`` and end the workers. Return False if the cleanup failed."""
        if sys.is_finalizing():  # imports are impossible now. Ray ends the workers itself
            return False
        import ray

        actors, identities, is_clean = self._actors, self._identities, True
        if not ray.is_initialized():  # the workers ended with the connection
            actors, identities = [], []
        elif cleanup_method is not None and self.is_healthy and not self._starting and self._actors:
            future = self.run_all_workers_single_data(cleanup_method)
            future.timeout_s = _CLEANUP_S
            try:
                future.get_results()
            except AlignerError:
                is_clean = False
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        # Wait until the local worker processes have ended, because others may need their memory.
        host, deadline = os.uname().nodename, time.monotonic() + _CLEANUP_S
        local_pids = [identity.pid for identity in identities if identity.host == host]
        while any(map(psutil.pid_exists, local_pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._actors, self._identities, self._starting = [], [], []
        return is_clean

    @contextlib.contextmanager
    def _unhealthy_on_error(self) -> Iterator[None]:
        try:
            yield
        except AlignerError:
            self.is_healthy = False
            raise

    def _start_call(
        self,
        method_name: str,
        kwargs: Mapping[str, Any],
        shards: Mapping[int, tuple[Any, ...]],
        returned: Sequence[int],
    ) -> MultiWorkerFuture:
        """Start a method call on each rank in ``shards``, which maps a rank to (shard,) or ()."""
        self.wait_until_started()
        common, name = _put(dict(kwargs)) if kwargs else {}, f"{self.name_prefix}.{method_name}"
        calls = [
            (
                self._actors[rank].call.remote(method_name, current_step(), (), common, *shard),
                self._identities[rank],
            )
            for rank, shard in shards.items()
        ]
        return MultiWorkerFuture(name, calls, returned, self._timeout_s)

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
        # One actor per bundle.
        process, starting = ray.remote(WorkerProcess), []
        for rank, bundle in enumerate(bundles):
            log = str(self.cluster.log_dir / f"{self.name_prefix}-{rank}.log")
            strategy = PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
            workers_on_node = sum(peer.node == bundle.node for peer in bundles)
            actor = process.options(scheduling_strategy=strategy, **options).remote(
                self.name_prefix, rank, log, os.getcwd(), environment, workers_on_node
            )
            self._actors.append(actor)
            # For messages until the process reports its host and pid.
            identity = WorkerIdentity(self.name_prefix, rank, "not known yet", "", 0, log)
            starting.append((actor.identity.remote(), identity))
        self._identities = wait_for(starting, f"{self.name_prefix}, starting", self._timeout_s)

    def _start_workers(
        self,
        bundles: Sequence[Bundle],
        builder: RayWorkerBuilder,
        parallel: ParallelConfig | None,
        seed: int,
    ) -> None:
        world = None
        if parallel is not None:
            call = self._actors[0].free_port.remote(), self._identities[0]
            ((host, port),) = wait_for([call], f"{self.name_prefix}, starting", self._timeout_s)
            world = TorchWorld(parallel, seed, self._timeout_s, len(self._actors), host, port)
        # Construct each worker with its rank in the environment.
        arguments = _put((builder.args, builder.kwargs))
        for rank, (actor, identity) in enumerate(zip(self._actors, self._identities, strict=True)):
            node = bundles[rank].node
            node_ranks = [peer for peer, bundle in enumerate(bundles) if bundle.node == node]
            rank_variables = {
                "RANK": str(rank),
                # A worker on a GPU sees only this GPU, as device 0.
                "LOCAL_RANK": "0" if self.cluster.use_gpus else str(node_ranks.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(node_ranks)),
                accelerator.SHARED_DEVICE: "1" if self.cluster.shares_bundles else "0",
            }
            start = actor.start.remote(builder.worker_class, arguments, rank_variables, world)
            self._starting.append((start, identity))


def _put(value: Any) -> Any:
    import ray

    return ray.put(value)


def _check_shards(method_name: str, data: Any, sizes: Sequence[int]) -> None:
    if not sizes:
        return
    if len(data) != sizes[0]:
        raise WorkerError(f"{method_name}: {len(data)} shards for {sizes[0]} coordinates")
    for part in data:
        _check_shards(method_name, part, sizes[1:])
