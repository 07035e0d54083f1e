"""The critic: its front `Value` and its workers."""

from aligner.config.published import ValueConfig

__all__ = ["ValueConfig"]
