"""Rewards: the protocol, verifiers, and every source of rewards."""
