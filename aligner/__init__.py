"""Align language models with reinforcement learning on megatron-core GPT models."""

from aligner.compat.paths import install

__version__ = "0.1.0"
install()
