"""Names and configuration keys of NeMo-Aligner and NeMo-RL."""
