"""Tokenizers, prompts and batches: everything between a file and a model's input."""
