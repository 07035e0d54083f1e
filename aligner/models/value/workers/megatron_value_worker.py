"""One process's share of a critic on megatron-core."""

from typing import TypeVar

from megatron.core.utils import unwrap_model as _unwrap_model

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.logprobs.output_layer import CapturingOutputLayer as _ValueOutputLayerBypass
from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel, forward_step_value
from aligner.models.gpt.megatron.reward import SharedBackboneRewardModel
from aligner.models.gpt.role.settings import RunSettings, reward_settings
from aligner.models.gpt.role.value import ValueHead
from aligner.models.reward.workers.reward_worker import RewardScorer
from aligner.models.value.workers.value_worker import ValueWorker

__all__ = [
    "MegatronValueWorker",
    "MegatronValueWorkerImpl",
    "TokenizerType",
    "ValueHead",
    "_ValueOutputLayerBypass",
    "_unwrap_model",
    "forward_step_value",
]
TokenizerType = TypeVar("TokenizerType", bound=Tokenizer)


class MegatronValueWorker(RewardScorer, ValueWorker[MegatronGPTCriticModel]):
    """Worker of `Value` on this backend. A reward model can share its backbone."""

    model_path = "aligner.models.gpt.megatron.critic:MegatronGPTCriticModel"
    _reward: SharedBackboneRewardModel | None = None

    # A reward model on the same backbone ------------------------------------------------------

    def share_backbone(
        self, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunSettings
    ) -> None:
        """See `ValueWorker.share_backbone`."""
        with open_nemo(config.restore_from_path) as checkpoint:
            self._reward = SharedBackboneRewardModel.in_critic(
                self.model,
                checkpoint,
                settings=reward_settings(config, run, learns=False),
                tokenizer=tokenizer,
            )

    @property
    def reward_model(self) -> SharedBackboneRewardModel:
        """Reward model that shares the backbone, after `share_backbone`."""
        assert self._reward is not None, "call share_backbone first"
        return self._reward

    # Gathering of weights ---------------------------------------------------------------------

    def enable_forward_pre_hook(self) -> None:
        """Gather, from the next update on, each weight in the forward pass that reads it.

        It has an effect only with several data-parallel workers in training.
        """
        if self.model.optimizer is not None:
            self.model.optimizer.defer_weight_gather()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Gather weights right after updates again, and now unless ``param_sync`` is False."""
        if self.model.optimizer is None:
            return
        if self.model.settings.overlap_param_gather:  # configured, not set by a caller
            if param_sync:
                self.model.collect_weights()
            return
        self.model.optimizer.gather_weights_after_updates(param_sync)

    def _gather_weights(self) -> None:
        self.disable_forward_pre_hook()


MegatronValueWorkerImpl = MegatronValueWorker  # NeMo-RL's class without Ray
