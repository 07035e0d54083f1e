"""Reward model on a transformers model."""

from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.role.reward import RewardRole


class DTensorRewardModel(RewardRole, DTensorCriticModel):
    """Reward model, the counterpart of `MegatronGPTRewardModel`."""
