"""A role on either backend: its interface, settings, optimizer step."""
