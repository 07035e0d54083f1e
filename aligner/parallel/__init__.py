"""Processes that compute together: their start, groups, collectives, and deaths noticed."""
