"""`RewardWorker`, one process's share of a reward model."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.worker import RoleWorker, passes_over

if TYPE_CHECKING:  # a handle's process need not import the model
    from aligner.models.gpt.megatron.reward import MegatronGPTRewardModel


class RewardScorer(ABC):
    """Mixin of workers with a reward model, separate or on the critic's backbone."""

    @property
    @abstractmethod
    def reward_model(self) -> "MegatronGPTRewardModel":
        """Model that scores."""

    def get_rewards(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Compute ``rewards`` float32 [B], or [B, K] for K rated attributes.

        Rewards are standardised if the model is. Reads ``input_ids`` int64 [B, S] and
        ``input_lengths`` int64 [B]. ``micro_batch_size``: sequences per forward pass, default as
        configured.
        """
        rewards = self.reward_model.infer(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"rewards": rewards})

    def reward_attributes(self) -> tuple[str, ...]:
        """Return the names of the rated attributes, empty for a model trained on comparisons."""
        return self.reward_model.attributes


class RewardWorker(RewardScorer, RoleWorker["MegatronGPTRewardModel"]):
    """Worker of `RewardModel`."""

    @property
    def reward_model(self) -> "MegatronGPTRewardModel":
        """Model of this worker."""
        return self.model

    def standardize(self, mean: float, std: float) -> None:
        """Apply ``(reward - mean) / std`` from now on, and save it with the model."""
        self.model.standardize(mean, std)

    def remember_sequences(self, add_bos: bool, end_id: int | None) -> None:
        """Record whether training sequences start with BOS, and their end token or None.

        Both are saved with the model, and scoring builds sequences of the same form.
        """
        self.model.remember_sequences(add_bos, end_id)
