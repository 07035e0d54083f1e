"""Algorithms: a folder each, and what their runs share."""
