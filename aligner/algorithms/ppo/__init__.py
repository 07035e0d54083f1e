"""PPO, and its kin without a critic."""
