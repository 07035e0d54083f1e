"""The policy: its front `Policy` and its workers."""
