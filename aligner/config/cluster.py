"""Placement of the workers: in the run's own processes, or in actors of a Ray cluster."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictStr

from aligner.config.fields import Count, Integer, Natural, Positive, Seconds


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
    """`ray`: `host:port` of the cluster to join; null: `RAY_ADDRESS`, or a Ray of the run's own.

    The latter is started on this machine and ended with the run.
    """

    colocated: StrictBool = True
    """`ray`: a policy and a critic worker share their CPUs or their GPU.

    `false`: each role has its own.
    """

    value_workers: Count | None = None
    """`ray`, not colocated: workers of the critic; null: as many as the policy.

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
