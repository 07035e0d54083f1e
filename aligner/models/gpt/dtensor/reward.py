"""Reward model on a transformers model."""

from typing import Self

from aligner.checkpoint.model_source import ModelSource
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.role.reward import RewardRole
from aligner.models.gpt.role.settings import RoleSettings


class DTensorRewardModel(RewardRole, DTensorCriticModel):
    """Reward model, the counterpart of `MegatronGPTRewardModel`."""

    @classmethod
    def from_checkpoint(
        cls, checkpoint: ModelSource, *, settings: RoleSettings, tokenizer: Tokenizer
    ) -> Self:
        """See `DTensorModel.from_checkpoint`. Settings of the file complete ``settings``."""
        settings = cls.settings_for(checkpoint, settings)
        model = super().from_checkpoint(checkpoint, settings=settings, tokenizer=tokenizer)
        model.read_config(checkpoint.config)
        return model
