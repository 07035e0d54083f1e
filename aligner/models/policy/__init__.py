"""The policy: its front `Policy` and its workers."""

from aligner.config.published import PolicyConfig

__all__ = ["PolicyConfig"]
