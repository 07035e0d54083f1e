"""One process's share of the policy."""
