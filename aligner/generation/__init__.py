"""Sampling: batches of queued rows, and engines outside the policy's processes."""

import aligner.config  # noqa: F401  (imports the engines' sections, which must not import it first)
