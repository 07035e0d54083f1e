"""Roles on megatron-core models."""
