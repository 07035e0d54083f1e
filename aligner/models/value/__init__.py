"""The critic: its handle `Value` and its workers."""

from aligner.config.translation.nemo_rl import ValueConfig

__all__ = ["ValueConfig"]
