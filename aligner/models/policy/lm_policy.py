"""`Policy`: the controller's handle of a group of policy workers.

Every method takes and returns global batches; the workers see their data-parallel shares.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aligner.compat.nemo_rl import PublishedRole
from aligner.config import SamplingOptions, TrainedModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.data.tokenizers.loading import as_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict, columns_of
from aligner.distributed.interfaces import Cluster
from aligner.distributed.workers import phase, run_sharded, scored_rows
from aligner.errors import ConfigError, TokenizerError
from aligner.kernels.counter_hash import CallSeeds
from aligner.models.gpt.decode.scheduler import TokenListener
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.handle import RoleHandle, checkpoint_paths, worker_class
from aligner.models.interfaces import (
    ColocatablePolicyInterface,
    GenerationInterface,
    check_generation_output,
)
from aligner.models.policy.workers.policy_worker import PolicyWorker
from aligner.models.worker import read_published
from aligner.refit.controller import RefitSource

WORKERS = {
    "megatron": "aligner.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker",
    "dtensor": "aligner.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
}
GENERATION_COLUMNS = ("input_ids", "input_lengths", "sample_ids")
LOGPROB_COLUMNS = ("input_ids", "input_lengths", "token_mask")


class Policy(RoleHandle, RefitSource, ColocatablePolicyInterface, GenerationInterface):
    """A language-model policy: samples, scores tokens, and learns."""

    def __init__(
        self,
        cluster: Cluster,
        config: TrainedModelConfig | Mapping[str, Any],
        tokenizer: Tokenizer,
        name_prefix: str = "lm_policy",
        workers_per_node: int | Sequence[int] | None = None,
        init_optimizer: bool = True,
        weights_path: str | os.PathLike[str] | None = None,
        optimizer_path: str | os.PathLike[str] | None = None,
        init_reference_model: bool = True,
        *,
        run: RunSettings | None = None,
        backend: str = "megatron",
        max_optimizer_steps: int | None = None,
    ) -> None:
        """Start the workers on ``cluster``; they load ``config.restore_from_path``.

        Args:
            cluster: where.
            config: the policy's section; or a mapping of `PolicyConfig`, which also has the
                backend and the environment of the workers. Its layout is theirs.
            tokenizer: ours, or one of transformers.
            name_prefix: role in messages and log names.
            workers_per_node: on Ray, bundles used on each node (a number, or one per node);
                default all.
            init_optimizer: False for a policy that does not learn.
            weights_path: continue from these weights of `save_checkpoint`; the reference policy
                remains that of ``config``.
            optimizer_path: continue from this optimizer state.
            init_reference_model: False keeps no copy of the initial weights, for runs without a KL
                term.
            run: precision, gradient clipping and seed; default those of a mapping, and the
                defaults of `RunSettings`.
            backend: ``megatron`` or ``dtensor``, where ``config`` is no mapping.
            max_optimizer_steps: what a schedule without ``max_steps`` decays over.

        Raises:
            ConfigError: a key of the mapping is unknown, or settings do not go together.
            LayoutError: the cluster's workers cannot be laid out so.
        """
        self.cfg = config
        published: PublishedRole | None = None
        if not isinstance(config, TrainedModelConfig):
            published = read_published(config)
            config, backend = published.model, published.backend
            run = run or RunSettings.of(published)
        run = run or RunSettings()
        check_policy_backend(backend, config)
        tokenizer = as_tokenizer(tokenizer)
        self._published = published
        if published is not None and published.stop_token_ids:
            stops = published.stop_token_ids  # end a response, as do the tokenizer's own
            try:
                tokenizer = tokenizer.with_end_tokens(stops)
            except TokenizerError as error:
                key = f"policy.generation.stop_token_ids={list(stops)}"
                raise ConfigError(f"{key}: {error}") from error
        workers = cluster.start_workers(
            worker_class(WORKERS, backend),
            name_prefix,
            parallel=config.parallel,
            workers_per_node=workers_per_node,
            env_vars=published.env_vars if published else None,
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
        self._seeds = CallSeeds(run.seed)

    get_logprobs = scored_rows(PolicyWorker.get_logprobs, LOGPROB_COLUMNS, ("kept_ids",))
    get_reference_policy_logprobs = scored_rows(
        PolicyWorker.get_reference_policy_logprobs, LOGPROB_COLUMNS, ("kept_ids",)
    )
    get_topk_logits = scored_rows(PolicyWorker.get_topk_logits, LOGPROB_COLUMNS)

    prepare_for_lp_inference = phase(PolicyWorker.prepare_for_lp_inference)
    prepare_for_generation = phase(PolicyWorker.prepare_for_generation)
    finish_generation = phase(PolicyWorker.finish_generation)

    def generate(
        self,
        data: BatchedDataDict,
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: SamplingOptions | None = None,
        listener: TokenListener | None = None,
    ) -> BatchedDataDict:
        """Continue the right-padded prompts in ``input_ids``; see ``GenerationOutputSpec``.

        Reads ``input_ids`` int64 [B, S], ``input_lengths`` int64 [B] and ``sample_ids`` int64 [B]
        (default 0, 1, 2, ...). The tokens of a sample depend on ``seed``, its ``sample_ids`` entry
        and its prompt only. Without a seed every call has one of its own, made of the run's seed
        and the number of the call.

        ``sampling_options``: lengths and sampling of this call, in place of the configured ones.
        ``listener`` receives every token that a worker of this process samples, by the row of its
        share of the prompts.

        Raises:
            ConfigError: a mapping without a section ``generation`` described this policy.
            DataError: a column is absent, or of what the workers return.
        """
        if self._published is not None and not self._published.generates:
            raise ConfigError(
                "policy.generation: not set, so nothing says how to sample; give it "
                "max_new_tokens, temperature, top_p and top_k"
            )
        results, _ = run_sharded(
            self.worker_group,
            PolicyWorker.generate,
            columns_of(data, GENERATION_COLUMNS),
            seed=self._seeds.next() if seed is None else seed,
            greedy=greedy,
            sampling_options=sampling_options,
            listener=listener,
        )
        output: BatchedDataDict = BatchedDataDict.from_batches(
            results, pad_value_dict={"output_ids": self.tokenizer.pad_id}
        )
        check_generation_output(output)
        if self._published is not None and self._published.pad_token_id is not None:
            position = torch.arange(output["output_ids"].shape[1])
            padding = position >= output["unpadded_sequence_lengths"].cpu()[:, None]
            output["output_ids"].masked_fill_(
                padding.to(output["output_ids"].device), self._published.pad_token_id
            )
        return output

    def recover(self) -> bool:
        """See `GenerationInterface.recover`.

        False where workers generate together (tensor, pipeline, context or expert parallelism):
        one that failed by itself has left the others waiting for it.
        """
        parallel = self.model.parallel
        together = parallel.model_parallel_size * parallel.expert > 1
        return not together and self.worker_group.recover()
