"""Who runs the workers: the run's own processes, or actors of a Ray cluster."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aligner.config.fields import Count, Natural, Positive, Range
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.run import BaseRunConfig


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
    timeout_s: Positive = 1800.0
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


def check_cluster(config: "BaseRunConfig") -> None:
    """Refuse what no engine can do, before anything is loaded."""
    cluster = config.cluster
    if cluster.engine == "local":
        for key in ("address", "value_workers"):
            value = getattr(cluster, key)
            if value is not None:
                raise ConfigError(
                    f"cluster.{key}={value} means nothing with cluster.engine=local; set "
                    f"cluster.engine=ray, or leave cluster.{key} at null"
                )
        if cluster.env_vars:
            raise ConfigError(
                f"cluster.env_vars={cluster.env_vars}: with cluster.engine=local the run's own "
                "processes are the workers; set the variables before the command, or "
                "cluster.engine=ray"
            )
    if cluster.value_workers is None:
        return
    if cluster.colocated:
        raise ConfigError(
            f"cluster.value_workers={cluster.value_workers} needs cluster.colocated=false, for a "
            "colocated critic has a worker beside each of the policy's; set it, or leave "
            "cluster.value_workers at null"
        )
    size = config.model.parallel.model_parallel_size
    if cluster.value_workers % size:
        raise ConfigError(
            f"cluster.value_workers={cluster.value_workers} is not a multiple of tensor x pipeline "
            f"x context = {size}, the layout that the critic shares with the policy; use "
            f"{-(-cluster.value_workers // size) * size}"
        )
