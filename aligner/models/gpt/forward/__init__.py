"""A forward pass over micro-batches, and log-probs out of it."""
