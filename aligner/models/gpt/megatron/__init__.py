"""Roles on megatron-core models."""

import aligner.kernels  # before megatron-core
import aligner.models.gpt.role  # noqa: F401  # before NeMo, which imports Lightning
