"""PPO and its relatives without a critic."""
