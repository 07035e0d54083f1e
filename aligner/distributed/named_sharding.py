"""`aligner.cluster.named_sharding` under NeMo-RL's name."""

from aligner.cluster.named_sharding import NamedSharding

__all__ = ["NamedSharding"]
