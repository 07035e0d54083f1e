"""Rewards from functions, reward models and reward servers, and ready-made verifiers."""
