"""The policy: its handle `Policy` and its workers."""

from aligner.config.translation.nemo_rl import PolicyConfig

__all__ = ["PolicyConfig"]
