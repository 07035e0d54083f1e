"""Sampling: batches of the rows that wait, and engines outside the policy's own processes."""
