"""Distillation of a larger model."""
