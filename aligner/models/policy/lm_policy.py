"""`Policy`: the controller's front of a group of policy workers.

Every method takes and returns global batches; the workers see their data-parallel shares.
"""

from typing import Any

from aligner.config import TrainedModelConfig
from aligner.config.batches import check_token_budgets
from aligner.config.peft import check_peft
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.worker_groups import Cluster
from aligner.models.gpt.settings import RunFacts
from aligner.models.interfaces import ColocatablePolicyInterface, GenerationInterface
from aligner.models.policy.refit import RefitSource
from aligner.models.role_front import RoleFront, checkpoint_paths, worker_class
from aligner.models.sharded import columns_of, run_on_all, run_sharded, score_sharded

WORKERS = {
    "megatron": "aligner.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker",
    "dtensor": "aligner.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
}
GENERATION_COLUMNS = ("input_ids", "input_lengths", "sample_ids")
LOGPROB_COLUMNS = ("input_ids", "input_lengths", "token_mask")


class Policy(RoleFront, RefitSource, ColocatablePolicyInterface, GenerationInterface):
    """A language-model policy: samples, scores tokens, and learns."""

    def __init__(
        self,
        cluster: Cluster,
        config: TrainedModelConfig,
        tokenizer: Tokenizer,
        run: RunFacts,
        name_prefix: str = "lm_policy",
        backend: str = "megatron",
        init_optimizer: bool = True,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_reference_model: bool = True,
        max_optimizer_steps: int | None = None,
    ) -> None:
        """Start the workers on ``cluster``; they load ``config.restore_from_path``.

        ``weights_path`` and ``optimizer_path``, of `save_checkpoint`, are where they continue
        instead; the reference policy remains that of ``config``.
        ``init_reference_model=False`` keeps no copy of the initial weights, for runs without a KL
        term. ``max_optimizer_steps`` is what a schedule without ``max_steps`` decays over.
        """
        check_token_budgets(config)
        check_peft(backend, config)
        workers = cluster.start_workers(
            worker_class(WORKERS, backend),
            name_prefix,
            config=config,
            tokenizer=tokenizer,
            run=run,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            max_optimizer_steps=max_optimizer_steps,
            **checkpoint_paths(weights_path, optimizer_path),
        )
        super().__init__(workers, config, config)
        self.tokenizer = tokenizer

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Log-probs of ``input_ids`` under the current weights.

        Reads ``input_ids`` int64 [B, S], ``input_lengths`` int64 [B] and ``token_mask`` float32
        [B, S] (1 where the log-prob is wanted). Returns ``logprobs`` float32 [B, S]: position t
        speaks of token t, 0 at t = 0 and where the mask is 0.
        """
        columns = columns_of(data, LOGPROB_COLUMNS)
        return score_sharded(self.worker_group, "get_logprobs", columns, self.model)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """As `get_logprobs` under the initial weights; the key is ``reference_logprobs``."""
        return score_sharded(
            self.worker_group,
            "get_reference_policy_logprobs",
            columns_of(data, LOGPROB_COLUMNS),
            self.model,
            micro_batch_size,
        )

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, vocab_size: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """The ``k`` tokens that are likeliest at each position, of the first ``vocab_size`` ids.

        Reads what `get_logprobs` reads. Returns ``topk_logits`` float32 [B, S, k], over the
        sampling temperature and in descending order, and ``topk_indices`` int64 [B, S, k]; position
        t speaks of token t, 0 at t = 0 and where the mask is 0. On megatron-core alone.
        """
        return score_sharded(
            self.worker_group,
            "get_topk_logits",
            columns_of(data, LOGPROB_COLUMNS),
            self.model,
            micro_batch_size,
            k=k,
            vocab_size=vocab_size,
        )

    def generate(
        self, data: BatchedDataDict, greedy: bool = False, *, seed: int = 0
    ) -> BatchedDataDict:
        """Continue the right-padded prompts in ``input_ids``; see ``GenerationOutputSpec``.

        The tokens of a sample depend on ``seed``, its ``sample_ids`` entry and its prompt alone.
        """
        results, _ = run_sharded(
            self.worker_group,
            "generate",
            columns_of(data, GENERATION_COLUMNS),
            seed=seed,
            greedy=greedy,
        )
        return BatchedDataDict.from_batches(
            results, pad_value_dict={"output_ids": self.tokenizer.pad_id}
        )

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Ready the workers to generate."""
        run_on_all(self.worker_group, "prepare_for_generation")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release what generation alone needs."""
        run_on_all(self.worker_group, "finish_generation")
        return True

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Ready the workers to score tokens."""
        run_on_all(self.worker_group, "prepare_for_lp_inference")
