"""Room for workers, as a worker group sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Bundle:
    """Room for one worker of each group: bundle ``index`` of a placement group on ``node``."""

    group: Any
    index: int
    node: str


class Room(Protocol):
    """Properties of a `RayVirtualCluster` that a worker group reads."""

    name: str
    timeout_s: float
    log_dir: Path

    @property
    def use_gpus(self) -> bool:
        """True if a bundle has a GPU."""
        ...

    @property
    def shares_bundles(self) -> bool:
        """True if workers of several groups may compute on one bundle, and on its GPU."""
        ...

    @property
    def worker_resources(self) -> Mapping[str, float]:
        """Ray's options for an actor: what it takes of its bundle."""
        ...

    def bundles_for(self, workers_per_node: int | Sequence[int] | None = None) -> list[Bundle]:
        """Bundles of a group with this many workers on each node (one number, or one per node)."""
        ...
