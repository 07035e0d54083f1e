"""Bundles of a Ray cluster, and the properties of the cluster that a worker group reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Bundle:
    """Bundle ``index`` of a placement group on ``node``. It has room for a worker per group."""

    group: Any
    index: int
    node: str


class BundleCluster(Protocol):
    """Interface of `RayVirtualCluster` for worker groups, which avoids a circular import."""

    name: str
    timeout_s: float
    log_dir: Path

    @property
    def use_gpus(self) -> bool:
        """True if each bundle includes a GPU."""

    @property
    def shares_bundles(self) -> bool:
        """True if workers of several groups may share a bundle and its GPU."""

    @property
    def worker_resources(self) -> Mapping[str, float]:
        """Ray's resource options of an actor."""

    def bundles_for(self, workers_per_node: int | Sequence[int] | None = None) -> list[Bundle]:
        """Return the bundles of a group. ``workers_per_node``: one value, or one per node."""
