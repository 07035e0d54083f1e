"""Placement of the workers: in the run's own processes, or in actors of a Ray cluster."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictStr

from aligner.config.fields import Count, Integer, Natural, Positive, Seconds
from aligner.foreign_keys import shown


@dataclass(frozen=True)
class ClusterConfig:
    """The engine, and what only Ray needs to know.

    The policy has ``trainer.devices`` x ``trainer.num_nodes`` workers on either engine.
    """

    engine: Literal["local", "ray"] = "local"
    """Workers in the run's own processes, or in actors of a Ray cluster.

    `local`: the processes that torchrun or `trainer.devices` started. `ray`: see docs/engines.md.
    """

    timeout_s: Seconds = 1800.0
    """Longest wait for another rank, and with `ray` for a worker's answer, in seconds.

    A rank on another machine that has not been heard of for a thirtieth of it (10 s at the least)
    is taken for dead; one on the same machine is missed at once. All others then stop with its
    name.
    """

    address: StrictStr | None = None
    """`ray`: `host:port` of the cluster to join.

    `null` means `RAY_ADDRESS`, or a Ray of the run's own. The latter is started on this machine and
    ended with the run.
    """

    colocated: StrictBool = True
    """`ray`: a policy and a critic worker share their CPUs or their GPU.

    `false`: each role has its own.
    """

    value_workers: Count | None = None
    """`ray`, not colocated: workers of the critic. `null` means as many as the policy.

    The policy has `trainer.devices` x `trainer.num_nodes`.
    """

    cpus_per_worker: Positive = 1.0
    """`ray`: CPUs that Ray reserves for a worker."""

    object_store_mb: Annotated[Integer, Interval(ge=80)] = 512
    """`ray`: memory of the object store that batches pass through, where the run starts Ray."""

    env_vars: dict[str, Any] = field(default_factory=dict)
    """`ray`: environment of the workers, there before they import anything.

    For example `NCCL_DEBUG`.
    """

    max_restarts: Natural = 3
    """`ray`: times that the workers are started anew after one of them has died.

    The run continues from the last run state.
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse keys of another engine, and workers that the critic's layout does not divide."""
        layouts_differ = run.value_parallel != run.model.parallel
        if self.engine == "local":
            for name in ("address", "value_workers"):
                if (value := getattr(self, name)) is not None:
                    yield (
                        f"{key}.{name}={value} means nothing with {key}.engine=local. Set "
                        f"{key}.engine=ray, or leave {key}.{name} at null"
                    )
            if self.env_vars:
                yield (
                    f"{key}.env_vars={self.env_vars}: with {key}.engine=local the run's own "
                    "processes are the workers. Set the variables before the command, or "
                    f"{key}.engine=ray"
                )
            if layouts_differ:
                sizes = ", ".join(
                    f"critic.{name}={shown(size)}"
                    for name, size in run.critic.own_layout.items()
                    if size != getattr(run.model, name)
                )
                yield (
                    f"{sizes}: with {key}.engine=local one process holds a policy and a critic "
                    f"worker, which have one layout. Set {key}.engine=ray, or leave the critic's "
                    "sizes at null"
                )
            return
        if self.value_workers is not None and self.colocated:
            yield (
                f"{key}.value_workers={self.value_workers} needs {key}.colocated=false, for a "
                "colocated critic has a worker beside each of the policy's. Set it, or leave "
                f"{key}.value_workers at null"
            )
        size, workers = run.value_parallel.model_parallel_size, run.value_world_size
        given = self.value_workers is not None
        if workers % size and (given or layouts_differ):  # else check_layout refuses them
            source = f"{key}.value_workers" if given else "trainer.devices x trainer.num_nodes"
            owner = (
                "of the critic's own"
                if layouts_differ
                else "that the critic shares with the policy"
            )
            yield (
                f"{source}={workers} is not a multiple of tensor x pipeline x context = {size}, "
                f"the layout {owner}. Use {-(-workers // size) * size}"
            )
