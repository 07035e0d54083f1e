"""Reward models in worker processes."""
