"""One process's share of a critic on megatron-core."""

from collections.abc import Mapping
from typing import Any, TypeVar

from megatron.core.utils import unwrap_model as _unwrap_model

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.parallel import ParallelState
from aligner.logprobs.output_layer import CapturingOutputLayer as _ValueOutputLayerBypass
from aligner.models.gpt import load_from_nemo
from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel, forward_step_value
from aligner.models.gpt.megatron.shared_reward import SharedBodyRewardModel
from aligner.models.gpt.megatron.value_head import ValueHead
from aligner.models.gpt.megatron.weight_gather import (
    defer_weight_gather,
    gather_weights_after_updates,
)
from aligner.models.gpt.role.settings import RoleSettings, RunFacts, continuing, reward_settings
from aligner.models.role_worker import micro_batches_of, tensors_on_device
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


class MegatronValueWorkerImpl(ValueWorker[MegatronGPTCriticModel]):
    """A critic of `Value` on this backend, which may lend its body to a reward model."""

    _reward: SharedBodyRewardModel | None = None

    @staticmethod
    def load(
        settings: RoleSettings,
        body_path: str,
        whole_path: str | None,
        tokenizer: Tokenizer,
        parallel: ParallelState,
    ) -> MegatronGPTCriticModel:
        """Load from a `.nemo`."""
        settings, whole_path = continuing(settings, whole_path)
        return load_from_nemo(
            MegatronGPTCriticModel,
            settings,
            restore_path=whole_path or body_path,
            tokenizer=tokenizer,
        )

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

    # Phases -----------------------------------------------------------------------------------

    def finish_inference(self) -> None:
        """Leave inference; with ``offload_weights`` no kept pass stays on the device either."""
        if self._offloads:
            self.model.kept_pass.drop()
        super().finish_inference()

    # When weights are gathered ----------------------------------------------------------------

    def enable_forward_pre_hook(self) -> None:
        """Gather, from the next update on, each weight in the forward pass that reads it.

        For data-parallel workers in training; alone, a worker has all weights anyway.
        """
        if self.model.optimizer is not None:
            defer_weight_gather(self.model.optimizer.model)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Gather weights right after updates again, and now unless ``param_sync`` is False."""
        if self.model.optimizer is None:
            return
        if self.model.settings.overlap_param_gather:  # the configuration's choice, not the caller's
            if param_sync:
                self.model.collect_weights()
            return
        gather_weights_after_updates(self.model.optimizer.model, param_sync)


class MegatronValueWorker(MegatronValueWorkerImpl):
    """Worker of `Value`, on every engine."""
