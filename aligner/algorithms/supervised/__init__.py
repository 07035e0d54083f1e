"""Learning from given examples."""
