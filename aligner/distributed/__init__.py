"""Global batches, worker groups and log-probs of sharded logits. Module names are NeMo-RL's."""
