"""The published place of what is in `aligner.losses.policy`."""

from aligner.losses.policy import PPOPolicyLoss, RatioLevel, Surrogate

__all__ = ["PPOPolicyLoss", "RatioLevel", "Surrogate"]
