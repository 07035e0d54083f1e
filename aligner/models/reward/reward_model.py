"""`RewardModel`: the controller's front of a group of reward-model workers."""

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.cluster.sharded import columns_of, run_on_all, score_sharded
from aligner.cluster.worker_groups import Cluster
from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.role.settings import RunFacts
from aligner.models.role_front import RoleFront, checkpoint_paths

WORKER = "aligner.models.reward.workers.megatron_reward_worker.MegatronRewardWorker"
REWARD_COLUMNS = ("input_ids", "input_lengths")


class RewardModel(RoleFront):
    """Scores whole sequences, and learns to."""

    def __init__(
        self,
        cluster: Cluster,
        config: TrainedModelConfig,
        tokenizer: Tokenizer,
        run: RunFacts,
        *,
        name_prefix: str = "reward_model",
        attributes: tuple[str, ...] | None = None,
        init_optimizer: bool = True,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        max_optimizer_steps: int | None = None,
        offload_weights: bool = False,
    ) -> None:
        """Start the workers on ``cluster``; see `MegatronRewardWorker`.

        They load ``config.restore_from_path``: a reward model, or a language model with a fresh
        head; ``weights_path`` and ``optimizer_path``, of `save_checkpoint`, are where they continue
        instead. ``attributes``: what the head rates; none for comparisons, None: as in the file.
        """
        workers = cluster.start_workers(
            WORKER,
            name_prefix,
            config=config,
            tokenizer=tokenizer,
            run=run,
            attributes=attributes,
            init_optimizer=init_optimizer,
            max_optimizer_steps=max_optimizer_steps,
            offload_weights=offload_weights,
            **checkpoint_paths(weights_path, optimizer_path),
        )
        super().__init__(workers, config, config)
        self.tokenizer = tokenizer
        self.attributes: tuple[str, ...] = run_on_all(workers, "attributes")[0]

    def get_rewards(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``rewards`` float32 [B], or [B, K] where K attributes are rated.

        Reads ``input_ids`` int64 [B, S] and ``input_lengths`` int64 [B]. Standardised where the
        model is (`standardize`).
        """
        return score_sharded(
            self.worker_group,
            "get_rewards",
            columns_of(data, REWARD_COLUMNS),
            self.model,
            micro_batch_size,
        )

    def standardize(self, mean: float, std: float) -> None:
        """Rewards are ``(reward - mean) / std`` from now on, in the saved model too."""
        run_on_all(self.worker_group, "standardize", mean=mean, std=std)

    def remember_sequences(self, add_bos: bool, end_id: int | None) -> None:
        """Record whether training's sequences began with BOS, and the token that ended all of them.

        Saved with the model; who asks it makes such sequences.
        """
        run_on_all(self.worker_group, "remember_sequences", add_bos=add_bos, end_id=end_id)
