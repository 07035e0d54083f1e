"""Runs that ask a model and train nothing: generate, evaluate."""
