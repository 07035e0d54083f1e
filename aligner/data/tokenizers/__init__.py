"""Tokenizers behind one interface, and from tokens back to text."""
