"""Products and hashes for which a CPU or a GPU has a better way."""
