"""Hugging Face directories, PEFT adapters and GGUF files."""
