"""The product under kills, damaged files, nonsense and hostile input: `make campaign`."""
