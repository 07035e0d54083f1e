"""Roles on transformers models, sharded by FSDP2 and DTensors."""
