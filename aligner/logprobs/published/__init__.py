"""NeMo-RL's functions on sharded logits, behind `aligner.distributed.model_utils`."""
