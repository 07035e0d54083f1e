"""Checks and values that involve more than one key."""
