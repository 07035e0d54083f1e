"""One process's share of the critic."""
