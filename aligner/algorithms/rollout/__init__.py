"""Rollouts: prompts, responses and rewards, for training and validation."""
