"""Adapters for environments of other libraries (docs/environments_adapters.md)."""
