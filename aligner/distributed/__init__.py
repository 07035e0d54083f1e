"""Devices, process groups and collectives; batches and workers under NeMo-RL's names."""
