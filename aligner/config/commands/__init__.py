"""Configuration of commands other than training."""
