"""Placement of the workers: in the processes of the run, or in actors of a Ray cluster."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictStr

from aligner.config.fields import Count, Integer, Natural, Positive, Seconds
from aligner.foreign_keys import shown


@dataclass(frozen=True)
class ClusterConfig:
    """Engine that starts the worker processes, local or Ray, and options of Ray."""

    engine: Literal["local", "ray"] = "local"
    """Processes of the workers. `local`: the processes that torchrun or the script starts. `ray`:
    actors of a Ray cluster (docs/engines.md)."""

    timeout_s: Seconds = 1800.0
    """Longest wait for another rank, and with `ray` for a worker's answer, in seconds. A rank on
    another machine counts as dead after a thirtieth of this time without a signal (at least 10
    s)."""

    address: StrictStr | None = None
    """`ray`: `host:port` of the cluster to join. `null` means `RAY_ADDRESS`, or Ray on this machine
    for the time of the run."""

    colocated: StrictBool = True
    """`ray`: place a policy and a critic worker on the same CPUs or the same GPU. `false` reserves
    separate resources for each role."""

    value_workers: Count | None = None
    """`ray`, not colocated: number of critic workers. `null` means as many as the policy has."""

    cpus_per_worker: Positive = 1.0
    """`ray`: CPUs that Ray reserves for a worker."""

    object_store_mb: Annotated[Integer, Interval(ge=80)] = 512
    """`ray`: memory in MiB of the object store, which transports batches, if the run starts Ray."""

    env_vars: dict[str, Any] = field(default_factory=dict)
    """`ray`: environment variables of the workers, such as `NCCL_DEBUG`."""

    max_restarts: Natural = 3
    """`ray`: maximum number of restarts after the death of a worker."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for the other engine's options, and invalid numbers of workers."""
        # Local engine: all models share the processes of the run.
        layouts_differ = run.value_parallel != run.model.parallel
        if self.engine == "local":
            for name in ("address", "value_workers", "env_vars"):
                if (value := getattr(self, name)) not in (None, {}):
                    empty = "{} (export the variables)" if name == "env_vars" else "null"
                    yield (
                        f"{key}.{name}={value} needs {key}.engine=ray, but {key}.engine=local. Set "
                        f"the engine, or set {key}.{name}={empty}"
                    )
            if layouts_differ:
                sizes = ", ".join(
                    f"critic.{name}={shown(size)}"
                    for name, size in run.critic.layout_overrides.items()
                    if size != getattr(run.model, name)
                )
                yield (
                    f"{sizes}: with {key}.engine=local policy and critic share their processes and "
                    f"their layout. Set {key}.engine=ray, or the critic's sizes to null"
                )
            return

        # Ray: each worker is an actor.
        if self.value_workers is not None and self.colocated:
            yield (
                f"{key}.value_workers={self.value_workers}: a colocated critic has as many workers "
                f"as the policy. Set {key}.colocated=false, or {key}.value_workers=null"
            )
        workers = run.value_world_size
        size = run.value_parallel.model_parallel_size
        is_set = self.value_workers is not None
        # If neither workers nor layout are the critic's own, `check_layout` checks the policy's.
        if workers % size and (is_set or layouts_differ):
            source = f"{key}.value_workers" if is_set else "trainer.devices x trainer.num_nodes"
            owner = "the critic's layout" if layouts_differ else "the layout of policy and critic"
            yield (
                f"{source}={workers} is not a multiple of tensor x pipeline x context = {size}, "
                f"{owner}. Use {math.ceil(workers / size) * size}"
            )
