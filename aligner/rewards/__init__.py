"""Reward functions: the protocol, the runner and the verifiers that come with the library."""
