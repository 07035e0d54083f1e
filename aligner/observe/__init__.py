"""What a run shows and leaves behind: metrics, samples, progress, start-up report, report."""
