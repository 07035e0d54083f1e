"""One process's share of a reward model, whatever it is built of."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.models.worker import RoleWorker, passes_over

if TYPE_CHECKING:  # a handle's process need not import the model
    from aligner.models.gpt.megatron.reward import MegatronGPTRewardModel


class RewardScorer(ABC):
    """Part of a worker that holds a reward model, its own or on the critic's backbone."""

    @property
    @abstractmethod
    def reward_model(self) -> "MegatronGPTRewardModel":
        """The model that scores."""

    def get_rewards(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``rewards`` float32 [B], or [B, K] where K attributes are rated.

        Reads ``input_ids`` int64 [B, S] and ``input_lengths`` int64 [B]. Standardised where the
        model is. ``micro_batch_size``: sequences per forward pass, default as configured.
        """
        rewards = self.reward_model.infer(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"rewards": rewards})

    def reward_attributes(self) -> tuple[str, ...]:
        """Names of what the model rates; none where it was trained on comparisons."""
        return self.reward_model.attributes


class RewardWorker(RewardScorer, RoleWorker["MegatronGPTRewardModel"]):
    """Serves `RewardModel`."""

    @property
    def reward_model(self) -> "MegatronGPTRewardModel":
        """The role itself."""
        return self.model

    def standardize(self, mean: float, std: float) -> None:
        """Rewards are ``(reward - mean) / std`` from now on, in the saved model too."""
        self.model.standardize(mean, std)

    def remember_sequences(self, add_bos: bool, end_id: int | None) -> None:
        """Record whether training's sequences began with BOS, and the token that ended all of them.

        Saved with the model; whoever scores with it makes such sequences.
        """
        self.model.remember_sequences(add_bos, end_id)
