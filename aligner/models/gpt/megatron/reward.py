"""Reward models on megatron-core: as separate models, or in the modules of a critic."""

from collections.abc import Mapping
from typing import Any, Self

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.checkpoint.model_source import ModelSource
from aligner.config import CriticConfig, ModelConfig, RSModelConfig, TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.lora import adapters_off
from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel
from aligner.models.gpt.role.reward import RewardModelType, RewardRole
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import SwappedWeights


class MegatronGPTRewardModel(RewardRole, MegatronGPTCriticModel):
    """Reward model on megatron-core, see `RewardRole`."""

    config_types = (TrainedModelConfig, ModelConfig, RSModelConfig, CriticConfig)


REWARD_MODEL_CLASS_DICT = dict.fromkeys(RewardModelType, MegatronGPTRewardModel)


class SharedBackboneRewardModel(MegatronGPTRewardModel):
    """Frozen reward model that scores with the modules of a critic.

    Its weights are in host memory. To score, they are exchanged with the critic's weights. Both
    models must have the same architecture (`body_differences`). The heads are separate.
    """

    def __init__(self, *args: Any, backbone: GPTModel, **kwargs: Any) -> None:
        self.__dict__["_backbone"] = backbone  # nn.Module.__init__ has not run yet
        super().__init__(*args, **kwargs)

    @classmethod
    def in_critic(
        cls,
        critic: MegatronGPTCriticModel,
        checkpoint: ModelSource,
        *,
        settings: RoleSettings,
        tokenizer: Tokenizer,
    ) -> Self:
        """Load a reward model into the modules of ``critic``, then restore the critic's weights."""
        # The critic's weights are in host memory while the reward model is loaded.
        backbone = critic.gpt
        critic_head = getattr(backbone, "rm_head", None)
        critic_weights = SwappedWeights(_without_head(backbone))
        try:
            model = cls.from_checkpoint(
                checkpoint, settings=settings, tokenizer=tokenizer, backbone=backbone
            )
            model._head = getattr(backbone, "rm_head", None)
            model._weights = SwappedWeights(_without_head(backbone))
        finally:
            critic_weights.exchange()
            _set_head(backbone, critic_head)
        critic.rewards_of = model.infer
        return model

    def build_gpt(self, initialize: bool) -> GPTModel:
        """Return the critic's backbone, with a new head."""
        assert not initialize  # the weights are loaded from a file
        self.add_head(self._backbone)
        return self._backbone

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        model: GPTModel | None = None,
    ) -> Tensor:
        """See `RoleModel.infer_tokens`. The critic's modules get the reward model's weights."""
        critic_head = getattr(self._backbone, "rm_head", None)
        with self._weights.in_place(), adapters_off(self._backbone):  # adapters are the critic's
            _set_head(self._backbone, self._head)
            try:
                return super().infer_tokens(batch, micro_batches, model)
            finally:
                _set_head(self._backbone, critic_head)


def _without_head(gpt: GPTModel) -> dict[str, Tensor]:
    return {name: value for name, value in gpt.named_parameters() if "rm_head." not in name}


def _set_head(gpt: GPTModel, head: Any) -> None:
    if head is not None:  # None before the last pipeline stage
        gpt.rm_head = head
