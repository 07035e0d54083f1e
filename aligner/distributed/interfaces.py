"""Interfaces of worker groups, their calls, and the clusters that start workers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aligner.distributed.batched_data_dict import SlicedDataDict
from aligner.distributed.named_sharding import NamedSharding


class WorkerFuture(Protocol):
    """Result of a method call that was started on several workers."""

    def get_results(self) -> list[Any]:
        """Wait for the call. Return the results, of replicated (equal) ones only the first."""


class WorkerGroup(Protocol):
    """Interface of a group of workers, which role handles such as `Policy` call."""

    sharding_annotations: NamedSharding  # layout of the workers
    is_healthy: bool  # False between a failed call and `recover`, as workers may wait for a peer

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> WorkerFuture:
        """Call a method with the same arguments on every worker."""

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        data: Sequence[SlicedDataDict],
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str],
        output_is_replicated: Sequence[str],
        common_kwargs: Mapping[str, Any] | None = None,
    ) -> WorkerFuture:
        """Call a method on every worker with its shard. Arguments: see `RayWorkerGroup`."""

    def get_all_worker_results(self, future: WorkerFuture) -> list[Any]:
        """Wait for a call and return its results, in the order of the shards."""

    def recover(self) -> bool:
        """After a failed call, wait until the workers answer again. Return True if all do."""

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Call ``cleanup_method`` on each worker, then end them. Return False if cleanup failed."""


class Cluster(Protocol):
    """Interface of a cluster on which workers can be started."""

    engine: str  # local | ray

    @property
    def use_gpus(self) -> bool:
        """True if workers compute on GPUs."""

    def start_workers(self, worker_class: str, name_prefix: str, **kwargs: Any) -> WorkerGroup:
        """Start a group of workers of ``worker_class``. Arguments: see `RayVirtualCluster`."""

    def world_size(self) -> int:
        """Return the number of workers."""
