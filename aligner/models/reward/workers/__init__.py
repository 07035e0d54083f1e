"""Workers of reward models."""
