"""Tokenizers with one interface, and decoding of tokens to text."""
