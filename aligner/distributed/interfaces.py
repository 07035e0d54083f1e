"""Interfaces of workers: groups of them, their calls, and where they are started."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aligner.distributed.batched_data_dict import SlicedDataDict
from aligner.distributed.named_sharding import NamedSharding


class WorkerFuture(Protocol):
    """A call on many workers that was started."""

    def get_results(self) -> list[Any]:
        """Wait for the call; one result per group of workers with the same output."""
        ...


class WorkerGroup(Protocol):
    """Interface of a group of workers, for handles."""

    sharding_annotations: NamedSharding
    is_whole: bool  # no worker waits for another that does not come: no call failed, or `recover`

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> WorkerFuture:
        """Call a method with the same arguments on every worker."""
        ...

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        data: Sequence[SlicedDataDict],
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str],
        output_is_replicated: Sequence[str],
        common_kwargs: Mapping[str, Any] | None = None,
    ) -> WorkerFuture:
        """Call a method on every worker with the shard of its coordinates."""
        ...

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int = 0, **kwargs: Any
    ) -> WorkerFuture:
        """Call a method on one worker."""
        ...

    def get_all_worker_results(self, future: WorkerFuture) -> list[Any]:
        """Results of a call, in order of the sharded axis."""
        ...

    def recover(self) -> bool:
        """After a call failed that has no collectives: wait for all workers; whether they answer.

        Then they may be called again, and ``is_whole`` is true.
        """
        ...

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """End the workers, calling ``cleanup_method`` on each first."""
        ...


class Cluster(Protocol):
    """Interface of places where workers can be started."""

    engine: str  # local | ray

    @property
    def use_gpus(self) -> bool:
        """True if workers compute on GPUs."""
        ...

    @property
    def sharding_annotations(self) -> NamedSharding:
        """Places of a training group's workers."""
        ...

    def start_workers(self, worker_class: str, name_prefix: str, **kwargs: Any) -> WorkerGroup:
        """Construct ``worker_class`` (a dotted path) with ``kwargs`` on every worker.

        Further keywords: ``parallel``, ``workers_per_node`` and ``env_vars``; on Ray ``layout`` and
        ``python_executable`` make workers of another kind; see
        `RayVirtualCluster.start_workers`.
        """
        ...

    def world_size(self) -> int:
        """Number of workers."""
        ...
