"""Names of the libraries that people come from."""
