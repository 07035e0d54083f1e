"""Environments of other libraries as ours, one module a library (docs/environments_adapters.md)."""
