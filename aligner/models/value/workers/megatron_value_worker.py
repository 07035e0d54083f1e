"""One process's share of a critic on megatron-core."""

from collections.abc import Mapping
from typing import Any

from aligner.config import CriticConfig, ModelConfig
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt import load_from_nemo
from aligner.models.gpt.critic import MegatronGPTCriticModel
from aligner.models.gpt.settings import RunFacts, critic_settings
from aligner.models.gpt.value_head import ValueHead
from aligner.models.megatron_worker import MegatronWorker, micro_batches_of, tensors_on_device

__all__ = ["MegatronValueWorker", "ValueHead"]


class MegatronValueWorker(MegatronWorker[MegatronGPTCriticModel]):
    """Loads the critic's body (the policy's, by default) and serves `Value`."""

    def __init__(
        self,
        config: CriticConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        run: RunFacts,
        parallel: ParallelState,
        init_optimizer: bool = True,
        max_optimizer_steps: int | None = None,
    ) -> None:
        critic = load_from_nemo(
            MegatronGPTCriticModel,
            critic_settings(config, model, run, max_optimizer_steps),
            restore_path=config.restore_from_path or model.restore_from_path,
            tokenizer=tokenizer,
        )
        super().__init__(critic, parallel)
        if init_optimizer:
            critic.setup_training()

    def get_values(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``values`` float32 ``[B, S]``, right-shifted: of the state before each token."""
        passes = micro_batches_of(data, micro_batch_size)
        values = self.model.get_values(tensors_on_device(data), passes)
        return BatchedDataDict({"values": values})
