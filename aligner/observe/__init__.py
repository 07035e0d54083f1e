"""Outputs of a run: metrics, samples, progress, start-up report, HTML report."""
