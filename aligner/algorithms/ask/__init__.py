"""Commands that use a model without training: generate, evaluate, serve."""
