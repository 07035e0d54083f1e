"""A forward pass over micro-batches, and log-probs out of it."""

import aligner.kernels  # noqa: F401  # before megatron-core
