"""Weights on disk, in every format, and run states."""
