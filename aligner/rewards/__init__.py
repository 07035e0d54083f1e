"""Rewards: the protocol, verifiers, and all sources of rewards."""
