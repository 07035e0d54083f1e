"""What the library costs on a GPU; `python -m benchmarks.gpu` runs all of it in its order."""
