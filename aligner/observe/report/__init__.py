"""HTML reports of runs and evaluations."""
