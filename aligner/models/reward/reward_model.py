"""`RewardModel`, the controller's handle of a group of reward-model workers."""

from collections.abc import Mapping
from typing import ClassVar

from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.interfaces import Cluster
from aligner.distributed.workers import on_all_workers, scored_rows
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.handle import RoleHandle
from aligner.models.reward.workers.reward_worker import RewardWorker

REWARD_COLUMNS = ("input_ids", "input_lengths")


class RewardModel(RoleHandle):
    """A trainable model that scores sequences."""

    workers: ClassVar[Mapping[str, str]] = {
        "megatron": "aligner.models.reward.workers.reward_worker.MegatronRewardWorker",
        "dtensor": "aligner.models.reward.workers.reward_worker.DTensorRewardWorker",
    }

    def __init__(
        self,
        cluster: Cluster,
        config: TrainedModelConfig,
        tokenizer: Tokenizer,
        run: RunSettings,
        *,
        name_prefix: str = "reward_model",
        attributes: tuple[str, ...] | None = None,
        init_optimizer: bool = True,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        offload_weights: bool = False,
        backend: str = "megatron",
    ) -> None:
        """Start the workers on ``cluster``.

        They load ``config.restore_from_path``: a reward model, or a language model with a new head.
        ``attributes``: attributes that the head rates, empty for comparisons, None for those of the
        file. For the other arguments see `Policy`.
        """
        super().__init__(
            cluster,
            config,
            config,
            name_prefix,
            backend,
            weights_path,
            optimizer_path,
            tokenizer=tokenizer,
            run=run,
            attributes=attributes,
            init_optimizer=init_optimizer,
            offload_weights=offload_weights,
        )
        self.tokenizer = tokenizer
        self.attributes = self.reward_attributes()

    get_rewards = scored_rows(RewardWorker.get_rewards, REWARD_COLUMNS)
    reward_attributes = on_all_workers(RewardWorker.reward_attributes)
    standardize = on_all_workers(RewardWorker.standardize)
    remember_sequences = on_all_workers(RewardWorker.remember_sequences)
