"""Checkpoints: `.nemo`, Hugging Face, GGUF, and the state of a run."""
