"""`MegatronValueWorker`, one process of a critic on a megatron-core model."""

from typing import Any

from aligner.checkpoint.model_source import open_model
from aligner.compat.paths import published
from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel
from aligner.models.gpt.megatron.reward import SharedBackboneRewardModel
from aligner.models.gpt.role.settings import RunSettings, reward_settings
from aligner.models.reward.reward_model import RewardScorer
from aligner.models.value.workers.value_worker import ValueWorker


class MegatronValueWorker(RewardScorer, ValueWorker):
    """Worker of `Value` on megatron-core. A reward model can use the critic's modules."""

    model_path = "aligner.models.gpt.megatron.critic:MegatronGPTCriticModel"
    model: MegatronGPTCriticModel
    _reward: SharedBackboneRewardModel | None = None

    def share_backbone(
        self, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunSettings
    ) -> None:
        """See `ValueWorker.share_backbone`."""
        settings = reward_settings(config, run, learns=False)
        with open_model(config.restore_from_path) as checkpoint:
            self._reward = SharedBackboneRewardModel.in_critic(
                self.model, checkpoint, settings=settings, tokenizer=tokenizer
            )

    @property
    def reward_model(self) -> SharedBackboneRewardModel:
        """Reward model that `share_backbone` loaded."""
        assert self._reward is not None, "call share_backbone first"
        return self._reward

    def enable_forward_pre_hook(self) -> None:
        """From the next update on, gather each weight in the forward pass that reads it.

        This method has an effect only in training with several data-parallel workers.
        """
        if self.model.optimizer is not None:
            self.model.optimizer.defer_weight_gather()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Undo `enable_forward_pre_hook`. ``param_sync``: also gather the weights now."""
        if self.model.settings.overlap_param_gather:  # configured, not set by a caller
            if param_sync:
                self.model.collect_weights()
        elif self.model.optimizer is not None:
            self.model.optimizer.gather_weights_after_updates(param_sync)


MegatronValueWorkerImpl = MegatronValueWorker  # NeMo-RL's class without Ray


def __getattr__(name: str) -> Any:  # other names that NeMo-RL's module has
    return published(__name__, name)
