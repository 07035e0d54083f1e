"""What a run writes and prints: metrics, samples, progress, start-up report, HTML report."""
