"""Sampling engines outside the policy's own processes."""
