"""Algorithms: trainers, and the pure functions on tensors they are made of."""
