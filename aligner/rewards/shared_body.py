"""`SharedBodyReward`: the front of a reward model that lives in the workers of the critic."""

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.cluster.sharded import columns_of, run_on_all, score_sharded
from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.role.settings import RunFacts
from aligner.models.reward.reward_model import REWARD_COLUMNS
from aligner.models.value.lm_value import Value


class SharedBodyReward:
    """Scores whole sequences, as `RewardModel` does, with weights that are swapped in."""

    def __init__(
        self, value: Value, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunFacts
    ) -> None:
        """Have the critic's workers load ``config.restore_from_path`` beside their own weights.

        ``config``: how sequences are cut into micro-batches, as for a separate reward model.
        """
        self._value, self._config = value, config
        group = value.worker_group
        run_on_all(group, "lend_body", config=config, tokenizer=tokenizer, run=run)
        self.attributes: tuple[str, ...] = run_on_all(group, "reward_attributes")[0]

    def prepare_for_inference(self) -> None:
        """The critic's weights whole and on the device, evaluation mode."""
        self._value.prepare_for_inference()

    def get_rewards(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """See `RewardModel.get_rewards`."""
        return score_sharded(
            self._value.worker_group,
            "get_rewards",
            columns_of(data, REWARD_COLUMNS),
            self._config,
            micro_batch_size,
        )

    def finish_inference(self) -> None:
        """The critic leaves inference."""
        self._value.finish_inference()
