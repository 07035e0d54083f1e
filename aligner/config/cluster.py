"""Who runs the workers: the run's own processes, or actors of a Ray cluster."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aligner.config.fields import Count, Natural, Positive, Range, Seconds
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
        if config.value_parallel != config.model.parallel:
            raise ConfigError(
                f"{_own_sizes(config)}: with cluster.engine=local one process holds a policy and a "
                "critic worker, which have one layout; set cluster.engine=ray, or leave the "
                "critic's sizes at null"
            )
    if cluster.value_workers is None:
        _check_value_workers(config, "trainer.devices x trainer.num_nodes", config.value_world_size)
        return
    if cluster.colocated:
        raise ConfigError(
            f"cluster.value_workers={cluster.value_workers} needs cluster.colocated=false, for a "
            "colocated critic has a worker beside each of the policy's; set it, or leave "
            "cluster.value_workers at null"
        )
    _check_value_workers(config, "cluster.value_workers", cluster.value_workers)


def _check_value_workers(config: "BaseRunConfig", key: str, workers: int) -> None:
    size = config.value_parallel.model_parallel_size
    shared = config.value_parallel == config.model.parallel
    if workers % size and not (shared and key != "cluster.value_workers"):  # the policy's matter
        whose = "that the critic shares with the policy" if shared else "of the critic's own"
        raise ConfigError(
            f"{key}={workers} is not a multiple of tensor x pipeline x context = {size}, the "
            f"layout {whose}; use {-(-workers // size) * size}"
        )


def _own_sizes(config: "BaseRunConfig") -> str:
    """The sizes in which the critic differs, as they are given."""
    critic = getattr(config, "critic", None)
    own = {} if critic is None else critic.own_layout
    return ", ".join(
        f"critic.{key}={str(size).lower()}"
        for key, size in own.items()
        if size != getattr(config.model, key)
    )
