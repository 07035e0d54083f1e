"""Losses under the paths they had; the code is in `aligner.losses`."""
