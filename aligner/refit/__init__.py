"""Weights from a policy's workers to sampling engines."""
