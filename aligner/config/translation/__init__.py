"""Translation of configurations of NeMo-RL and NeMo-Aligner to those of this library."""
