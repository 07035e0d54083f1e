"""HTML reports of runs, evaluations and comparisons."""
