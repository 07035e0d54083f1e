"""Placement of the workers: in the run's own processes, or in actors of a Ray cluster."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from aligner.config.fields import Count, Natural, Positive, Range, Seconds


@dataclass(frozen=True)
class ClusterConfig:
    """The engine, and what only Ray needs to know.

    The policy has ``trainer.devices`` x ``trainer.num_nodes`` workers on either engine.
    """

    # local: the processes that torchrun or trainer.devices started; ray: actors of a Ray cluster.
    engine: Literal["local", "ray"] = "local"
    # Longest wait for another rank in a collective, and under ray for a worker's answer. A rank on
    # another machine that has not been heard of for a thirtieth of it (10 s at the least) is taken
    # for dead.
    timeout_s: Seconds = 1800.0
    # ray: host:port of the cluster to join; null: RAY_ADDRESS, or else a Ray of the run's own.
    address: str | None = None
    colocated: bool = True  # ray: a policy and a critic worker share their CPUs or GPU
    value_workers: Count | None = None  # ray, not colocated: critic workers; null: as the policy
    cpus_per_worker: Positive = 1.0  # ray: CPUs that Ray reserves for a worker
    # ray: memory of the object store that batches pass through, where the run starts Ray itself.
    object_store_mb: Annotated[int, Range(low=80)] = 512
    # ray: environment of the workers, there before they import anything.
    env_vars: dict[str, Any] = field(default_factory=dict)
    max_restarts: Natural = 3  # ray: times the workers are started anew after one has died
