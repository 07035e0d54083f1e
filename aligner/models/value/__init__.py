"""The critic: its handle `Value` and its workers."""

from aligner.config.elsewhere.nemo_rl import ValueConfig

__all__ = ["ValueConfig"]
