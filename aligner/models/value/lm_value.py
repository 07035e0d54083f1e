"""`Value`: the controller's front of a group of value workers."""

from aligner.config import CriticConfig, ModelConfig
from aligner.config.batches import check_token_budgets
from aligner.config.peft import check_peft
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.worker_groups import Cluster
from aligner.models.gpt.settings import RunFacts
from aligner.models.interfaces import ValueInterface
from aligner.models.role_front import RoleFront, checkpoint_paths, worker_class
from aligner.models.sharded import columns_of, score_sharded

WORKERS = {
    "megatron": "aligner.models.value.workers.megatron_value_worker.MegatronValueWorker",
    "dtensor": "aligner.models.value.workers.dtensor_value_worker_v2.DTensorValueWorkerV2",
}
VALUE_COLUMNS = ("input_ids", "input_lengths", "token_mask")


class Value(RoleFront, ValueInterface):
    """A critic: predicts the return from every state, and learns it."""

    def __init__(
        self,
        cluster: Cluster,
        config: CriticConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        run: RunFacts,
        name_prefix: str = "lm_value",
        backend: str = "megatron",
        init_optimizer: bool = True,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        max_optimizer_steps: int | None = None,
    ) -> None:
        """Start the workers on ``cluster``.

        ``model`` gives the layout and the micro-batching that they share with the policy.

        They load ``config.restore_from_path``, or the policy's weights with a fresh head;
        ``weights_path`` and ``optimizer_path``, of `save_checkpoint`, are where they continue
        instead.
        """
        check_token_budgets(model)
        check_peft(backend, model)
        workers = cluster.start_workers(
            worker_class(WORKERS, backend),
            name_prefix,
            config=config,
            model=model,
            tokenizer=tokenizer,
            run=run,
            init_optimizer=init_optimizer,
            max_optimizer_steps=max_optimizer_steps,
            **checkpoint_paths(weights_path, optimizer_path),
        )
        super().__init__(workers, config, model)

    def get_values(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``values`` float32 [B, S]: position t is the value of the state before token t.

        0 at t = 0; positions outside ``token_mask`` may hold anything finite.
        """
        return score_sharded(
            self.worker_group,
            "get_values",
            columns_of(data, VALUE_COLUMNS),
            self.model,
            micro_batch_size,
        )
