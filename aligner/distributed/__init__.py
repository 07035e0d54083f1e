"""Global batches, worker groups and log-probs of sharded logits; module names are NeMo-RL's."""
