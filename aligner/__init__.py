"""Align language models with reinforcement learning on megatron-core GPT models."""

__version__ = "0.1.0"
