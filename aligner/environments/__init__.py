"""Environments: multi-turn conversations with a reward for each turn."""

from aligner.environments.protocol import MessageEnv, Start, Turn

__all__ = ["MessageEnv", "Start", "Turn"]
