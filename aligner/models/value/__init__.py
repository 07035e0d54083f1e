"""The critic: its front `Value` and its workers."""
