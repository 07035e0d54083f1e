"""`Value`: the controller's front of a group of value workers."""

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.config import CriticConfig, ModelConfig
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.worker_groups import Cluster
from aligner.models.gpt.settings import RunFacts
from aligner.models.interfaces import ValueInterface
from aligner.models.sharded import (
    columns_of,
    micro_batching,
    run_on_all,
    run_sharded,
    score_sharded,
    train_result,
)
from aligner.types import LossFunction

WORKERS = {"megatron": "aligner.models.value.workers.megatron_value_worker.MegatronValueWorker"}
VALUE_COLUMNS = ("input_ids", "input_lengths", "token_mask")


class Value(ValueInterface):
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
        max_optimizer_steps: int | None = None,
    ) -> None:
        """Start the workers on ``cluster``.

        ``model`` gives the layout and the micro-batching that they share with the policy.

        They load ``config.restore_from_path``, or the policy's weights with a fresh head.
        """
        self.config = config
        self.model = model
        self.worker_group = cluster.start_workers(
            WORKERS[backend],
            name_prefix,
            config=config,
            model=model,
            tokenizer=tokenizer,
            run=run,
            init_optimizer=init_optimizer,
            max_optimizer_steps=max_optimizer_steps,
        )
        self.sharding_annotations = self.worker_group.sharding_annotations

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

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One pass over ``data``; see ``Policy.train``."""
        gbs = gbs or self.config.global_batch_size
        results, _ = run_sharded(
            self.worker_group,
            "train",
            data,
            batch_size=gbs,
            batching=micro_batching(self.model, training=True, micro_batch_size=mbs),
            loss_fn=loss_fn,
            eval_mode=eval_mode,
            gbs=gbs,
            mbs=mbs or self.config.micro_batch_size,
        )
        return train_result(results)

    def prepare_for_inference(self) -> None:
        """Ready the workers to predict values."""
        run_on_all(self.worker_group, "prepare_for_inference")

    def finish_inference(self) -> None:
        """Leave inference."""
        run_on_all(self.worker_group, "finish_inference")

    def prepare_for_training(self) -> None:
        """Ready the workers to train; optimizer state returns to the device."""
        run_on_all(self.worker_group, "prepare_for_training")

    def finish_training(self) -> None:
        """Leave training; optimizer state may leave the device."""
        run_on_all(self.worker_group, "finish_training")

    def state_dict(self) -> dict[str, Any]:
        """This process's share of weights, optimizer and schedule, as the run state keeps it."""
        return run_on_all(self.worker_group, "state_dict")[0]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `state_dict`, from the shares of all processes of the run that was saved."""
        run_on_all(self.worker_group, "load_state_dict", states=states)

    def num_parameters(self) -> int:
        """Parameters of the whole critic."""
        return run_on_all(self.worker_group, "num_parameters")[0]

    def shutdown(self) -> bool:
        """End the workers."""
        return self.worker_group.shutdown()
