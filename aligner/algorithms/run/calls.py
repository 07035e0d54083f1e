"""Names of roles and phases by worker calls, and clusters that report worker calls.

A dry run measures the phases that its loop times, and `aligner plan` the phases of a rehearsal.
"""

from dataclasses import fields
from typing import Any

from aligner.algorithms.run.engine import Clusters
from aligner.catalog import ENGINES
from aligner.distributed.interfaces import Cluster, WorkerGroup

# Names of roles by prefixes of their workers, and of phases by methods of workers.
_ROLES = {"lm_policy": "policy", "lm_value": "critic", **dict.fromkeys(ENGINES, "policy")}
_PHASES = {
    "get_reference_policy_logprobs": "reference_logprobs",
    "get_topk_logits": "teacher",
    "prepare_for_training": "train",
    "prepare_for_generation": "generate",
    "start_generation": "generate",
}


def role_named(prefix: str) -> str:
    """Return the name of the role whose workers have the prefix ``prefix``."""
    return _ROLES.get(prefix, prefix.replace("_", " "))


def phase_named(method: str) -> str:
    """Return the name of the phase in which a worker's method is called."""
    return _PHASES.get(method, method.removeprefix("get_"))


class Calls:
    """Role and phase of the last worker call in each timed phase of a step, in order."""

    def __init__(self) -> None:
        self.phase = ""  # the phase that is being timed
        self.names: dict[str, tuple[str, str]] = {}

    def watch(self, clusters: Clusters) -> Clusters:
        """Return ``clusters`` with worker groups that report their calls."""
        return Clusters(
            *(_WatchedCluster(getattr(clusters, field.name), self) for field in fields(clusters))
        )


class _WatchedCluster:
    """A cluster whose worker groups report their calls."""

    def __init__(self, cluster: Cluster, calls: Calls) -> None:
        self._cluster, self._calls = cluster, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def start_workers(self, worker_class: str, name_prefix: str, **kwargs: Any) -> Any:
        """See `Cluster`."""
        group = self._cluster.start_workers(worker_class, name_prefix, **kwargs)
        return _WatchedGroup(group, role_named(name_prefix), self._calls)


class _WatchedGroup:
    """A worker group that reports each call before making it."""

    def __init__(self, group: WorkerGroup, role: str, calls: Calls) -> None:
        self._group, self.role, self._calls = group, role, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> Any:
        """See `WorkerGroup`."""
        if method_name in _PHASES:
            self._calls.names[self._calls.phase] = self.role, phase_named(method_name)
        return self._group.run_all_workers_single_data(method_name, **kwargs)

    def run_all_workers_sharded_data(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup`."""
        self._calls.names[self._calls.phase] = self.role, phase_named(method_name)
        return self._group.run_all_workers_sharded_data(method_name, *args, **kwargs)
