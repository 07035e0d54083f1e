"""Roles on megatron-core models."""

import aligner.models.gpt.role  # noqa: F401  # before NeMo, which imports Lightning
from aligner.importing import import_without

import_without("megatron.core", "wandb")  # for its inference engine, which is not used
