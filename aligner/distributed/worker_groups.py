"""`aligner.cluster.worker_groups` under NeMo-RL's name."""

from typing import Any

from aligner.cluster import worker_groups
from aligner.cluster.interfaces import Cluster, WorkerFuture, WorkerGroup
from aligner.cluster.named_sharding import AXES, MODEL_AXES, layout_of
from aligner.cluster.worker_groups import LocalCluster, LocalFuture, LocalWorkerGroup, to_host

__all__ = [
    "AXES",
    "Cluster",
    "LocalCluster",
    "LocalFuture",
    "LocalWorkerGroup",
    "MODEL_AXES",
    "WorkerFuture",
    "WorkerGroup",
    "layout_of",
    "to_host",
]


def __getattr__(name: str) -> Any:
    """Names that import Ray on first use."""
    return getattr(worker_groups, name)
