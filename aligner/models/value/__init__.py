"""The critic: its handle `Value` and its workers."""

from aligner.compat.nemo_rl import ValueConfig

__all__ = ["ValueConfig"]
