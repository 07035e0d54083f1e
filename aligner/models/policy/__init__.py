"""The policy: its handle `Policy` and its workers."""

from aligner.compat.nemo_rl import PolicyConfig

__all__ = ["PolicyConfig"]
