"""Configuration of each algorithm's data and training loop."""
