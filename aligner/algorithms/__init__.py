"""Algorithms, one folder each, and the code that their runs share."""
