"""Costs of the library on a GPU. `python -m benchmarks.gpu` runs all of it in its order."""
