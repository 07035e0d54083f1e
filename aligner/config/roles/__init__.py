"""Configuration of a role: model, optimizer, adapters, backend."""
