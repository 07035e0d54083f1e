"""Several runs: pipelines of stages, comparisons."""
