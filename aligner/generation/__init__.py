"""Sampling: batches of the rows that wait, and engines outside the policy's own processes."""

import aligner.config  # noqa: F401  (it imports the sections of the engines, never they it)
