"""`RewardWorker`, one process of a reward model, and `RewardModel`, which calls the workers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.interfaces import Cluster
from aligner.distributed.workers import on_all_workers, scored_rows
from aligner.models.gpt.role.settings import RunSettings, reward_settings, settings_to_continue
from aligner.models.handle import RoleHandle
from aligner.models.worker import RoleWorker, passes_over
from aligner.parallel.groups import ParallelState

if TYPE_CHECKING:  # a handle's process need not import the model
    from aligner.models.gpt.role.reward import RewardRole


class RewardScorer(ABC):
    """Mixin of workers with a reward model, separate or in the modules of a critic."""

    @property
    @abstractmethod
    def reward_model(self) -> "RewardRole":
        """Reward model that computes the scores."""

    def get_rewards(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Compute ``rewards`` float32 [B], or [B, K] for K rated attributes.

        They are standardised if the model has a standardisation. Reads ``input_ids`` int64 [B, S]
        and ``input_lengths`` int64 [B]. ``micro_batch_size``: number of sequences per forward pass.
        """
        rewards = self.reward_model.infer(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"rewards": rewards})

    def reward_attributes(self) -> tuple[str, ...]:
        """Return the names of the rated attributes, empty for a model trained on comparisons."""
        return self.reward_model.attributes


class RewardWorker(RewardScorer, RoleWorker["RewardRole"]):
    """Worker of `RewardModel`. It loads a reward model, or a language model with a new head.

    ``offload_weights``: keep weights in host memory between phases.
    """

    def __init__(
        self,
        config: TrainedModelConfig,
        tokenizer: Tokenizer,
        run: RunSettings,
        parallel: ParallelState,
        *,
        attributes: tuple[str, ...] | None = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        offload_weights: bool = False,
    ) -> None:
        settings = reward_settings(config, run, attributes, init_optimizer)
        settings, whole_path = settings_to_continue(settings, weights_path)
        model = self.load_model(settings, whole_path or config.restore_from_path, tokenizer)
        super().__init__(
            model,
            parallel,
            offloads=offload_weights,
            init_optimizer=init_optimizer,
            optimizer_path=optimizer_path,
        )
        if init_optimizer:
            # Training makes the standardisation and sequence form in the file obsolete.
            model.standardization = model.sequence_form = None

    @property
    def reward_model(self) -> "RewardRole":
        """Model of this worker."""
        return self.model

    def standardize(self, mean: float, std: float) -> None:
        """Set the standardisation ``(reward - mean) / std``, which is saved with the model."""
        self.model.standardize(mean, std)

    def remember_sequences(self, add_bos: bool, end_id: int | None) -> None:
        """Set whether training sequences begin with BOS, and their end token (see `RewardRole`)."""
        self.model.remember_sequences(add_bos, end_id)


class MegatronRewardWorker(RewardWorker):
    """Worker of `RewardModel` on megatron-core."""

    model_path = "aligner.models.gpt.megatron.reward:MegatronGPTRewardModel"


class DTensorRewardWorker(RewardWorker):
    """Worker of `RewardModel` on a transformers model, sharded by FSDP2."""

    model_path = "aligner.models.gpt.dtensor.critic:DTensorRewardModel"


REWARD_COLUMNS = ("input_ids", "input_lengths")


class RewardModel(RoleHandle):
    """Reward model that scores sequences and can be trained."""

    workers: ClassVar[Mapping[str, str]] = {
        "megatron": "aligner.models.reward.reward_model.MegatronRewardWorker",
        "dtensor": "aligner.models.reward.reward_model.DTensorRewardWorker",
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
        ``attributes``: names of the attributes that the head rates, empty for training on
        comparisons, None for the file's attributes. For the other arguments see `Policy`.
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
