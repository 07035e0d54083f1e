"""Environments: conversations of many turns, each of which may earn a reward."""

from aligner.environments.protocol import MessageEnv, Start, Turn

__all__ = ["MessageEnv", "Start", "Turn"]
