"""Losses and advantages: pure functions on tensors."""
