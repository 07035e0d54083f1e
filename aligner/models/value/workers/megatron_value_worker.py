"""One process's share of a critic on megatron-core."""

from collections.abc import Mapping
from typing import Any

from aligner.checkpoint.nemo import open_nemo
from aligner.config import CriticConfig, ModelConfig, TrainedModelConfig
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt import load_from_nemo
from aligner.models.gpt.critic import MegatronGPTCriticModel, forward_step_value
from aligner.models.gpt.settings import RunFacts, continuing, critic_settings, reward_settings
from aligner.models.gpt.shared_reward import SharedBodyRewardModel
from aligner.models.gpt.value_head import ValueHead
from aligner.models.gpt.weight_gather import defer_weight_gather, gather_weights_after_updates
from aligner.models.megatron_worker import micro_batches_of, tensors_on_device
from aligner.models.value.workers.value_worker import ValueWorker

__all__ = ["MegatronValueWorker", "MegatronValueWorkerImpl", "ValueHead", "forward_step_value"]


class MegatronValueWorkerImpl(ValueWorker[MegatronGPTCriticModel]):
    """Loads the critic's body (the policy's, by default) and serves `Value`.

    Args:
        config: the critic's section.
        model: the policy's; its layout is the critic's.
        tokenizer: packaged when the critic is saved.
        run: what all roles share.
        parallel: this process's place.
        weights_path: load these weights and this head instead of what ``config`` names.
        optimizer_path: continue from this optimizer state, a directory of `save_checkpoint`.
        init_optimizer: False for a critic that only predicts.
        max_optimizer_steps: what a schedule without ``max_steps`` decays over.
    """

    def __init__(
        self,
        config: CriticConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        run: RunFacts,
        parallel: ParallelState,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        max_optimizer_steps: int | None = None,
    ) -> None:
        settings = critic_settings(config, model, run, max_optimizer_steps)
        settings, whole_path = continuing(settings, weights_path)
        critic = load_from_nemo(
            MegatronGPTCriticModel,
            settings,
            restore_path=whole_path or config.restore_from_path or model.restore_from_path,
            tokenizer=tokenizer,
        )
        super().__init__(critic, parallel, config, init_optimizer, optimizer_path)
        self._reward: SharedBodyRewardModel | None = None

    # A reward model in the same body ----------------------------------------------------------

    def lend_body(self, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunFacts) -> None:
        """Load the reward model that ``config`` names; its weights wait in host memory.

        ``config``: that of a reward model of its own; ``tokenizer``: the reward model's.
        """
        with open_nemo(config.restore_from_path) as checkpoint:
            self._reward = SharedBodyRewardModel.in_critic(
                self.model,
                checkpoint,
                settings=reward_settings(config, run, learns=False),
                tokenizer=tokenizer,
            )

    def get_rewards(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``rewards`` float32 ``[B]``, or ``[B, K]`` of K attributes; between the two phases of
        inference, as `get_values`.
        """
        passes = micro_batches_of(data, micro_batch_size)
        return BatchedDataDict({"rewards": self._lodger().infer(tensors_on_device(data), passes)})

    def reward_attributes(self) -> tuple[str, ...]:
        """Names of what the reward model rates; none where it was trained on comparisons."""
        return self._lodger().attributes

    def _lodger(self) -> SharedBodyRewardModel:
        assert self._reward is not None, "lend_body comes first"
        return self._reward

    # When weights are gathered ----------------------------------------------------------------

    def enable_forward_pre_hook(self) -> None:
        """From the next update on, gather each weight in the forward pass that reads it.

        For data-parallel workers in training; alone, a worker has all weights anyway.
        """
        if self.model.optimizer is not None:
            defer_weight_gather(self.model.optimizer.model)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Gather weights right after updates again, and now unless ``param_sync`` is False."""
        if self.model.optimizer is not None:
            gather_weights_after_updates(self.model.optimizer.model, param_sync)


class MegatronValueWorker(MegatronValueWorkerImpl):
    """What every engine starts as a worker of `Value`."""
