"""The modules of a transformer layer."""
