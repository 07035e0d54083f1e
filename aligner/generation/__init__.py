"""Sampling: batches of queued rows, and engines that run outside the policy's processes."""

import aligner.config  # noqa: F401  (imports the engines' sections, which must not import it first)
