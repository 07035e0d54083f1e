"""Processes that compute together: start, groups, collectives, and detection of dead ranks."""
