"""NeMo-RL's place of what is in `aligner.cluster.ray.virtual_cluster`."""

from aligner.cluster.ray.virtual_cluster import Bundle, RayVirtualCluster

__all__ = ["Bundle", "RayVirtualCluster"]
