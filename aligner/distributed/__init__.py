"""Batches, worker groups, and log-probs of sharded logits. The module names are NeMo-RL's."""
