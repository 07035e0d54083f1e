"""Roles on transformers models, sharded by FSDP2 and DTensors."""

import aligner.models.gpt.role  # noqa: F401  # before Lightning
