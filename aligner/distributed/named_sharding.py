"""NeMo-RL's place of what is in `aligner.cluster.named_sharding`."""

from aligner.cluster.named_sharding import NamedSharding

__all__ = ["NamedSharding"]
