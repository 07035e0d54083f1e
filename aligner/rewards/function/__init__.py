"""Reward functions in threads and processes."""
