"""Checks of the cluster against the run's layout."""

from aligner.config.run import BaseRunConfig
from aligner.errors import ConfigError


def check_cluster(config: BaseRunConfig) -> None:
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


def _check_value_workers(config: BaseRunConfig, key: str, workers: int) -> None:
    size = config.value_parallel.model_parallel_size
    shared = config.value_parallel == config.model.parallel
    if workers % size and not (shared and key != "cluster.value_workers"):  # the policy's matter
        whose = "that the critic shares with the policy" if shared else "of the critic's own"
        raise ConfigError(
            f"{key}={workers} is not a multiple of tensor x pipeline x context = {size}, the "
            f"layout {whose}; use {-(-workers // size) * size}"
        )


def _own_sizes(config: BaseRunConfig) -> str:
    """The sizes in which the critic differs, as they are given."""
    critic = getattr(config, "critic", None)
    own = {} if critic is None else critic.own_layout
    return ", ".join(
        f"critic.{key}={str(size).lower()}"
        for key, size in own.items()
        if size != getattr(config.model, key)
    )
