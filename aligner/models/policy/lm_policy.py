"""`Policy`, the controller's handle of a group of policy workers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from aligner.config import SamplingOptions, TrainedModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device.counter_hash import CallSeeds
from aligner.distributed.batched_data_dict import BatchedDataDict, check_columns, columns_of
from aligner.distributed.interfaces import Cluster
from aligner.distributed.workers import phase, run_sharded, scored_rows
from aligner.errors import ConfigError
from aligner.models.gpt.decode.scheduler import TokenListener
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.handle import RoleHandle
from aligner.models.interfaces import (
    ColocatablePolicyInterface,
    GenerationInterface,
    GenerationOutputSpec,
)
from aligner.models.policy.workers.policy_worker import PolicyWorker, read_policy
from aligner.refit.controller import RefitSource

GENERATION_COLUMNS = ("input_ids", "input_lengths", "sample_ids")
LOGPROB_COLUMNS = ("input_ids", "input_lengths", "token_mask")


class Policy(RoleHandle, RefitSource, ColocatablePolicyInterface, GenerationInterface):
    """A language-model policy that samples, scores tokens, and trains."""

    workers: ClassVar[Mapping[str, str]] = {
        "megatron": "aligner.models.policy.workers.policy_worker.MegatronPolicyWorker",
        "dtensor": "aligner.models.policy.workers.policy_worker.DTensorPolicyWorkerV2",
    }

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
    ) -> None:
        """Start the workers on ``cluster``, which load ``config.restore_from_path``.

        Args:
            cluster: cluster of the workers.
            config: the policy's section, with the layout of the workers, or a mapping of
                `PolicyConfig`, which also contains the backend and the workers' environment.
            tokenizer: a tokenizer of this library or of transformers.
            name_prefix: name of the role in messages and log names.
            workers_per_node: on Ray, number of bundles to use on each node, or one per node.
                Default: all.
            init_optimizer: whether to create an optimizer. False for a frozen policy.
            weights_path: weights from `save_checkpoint` to continue from. The reference policy
                still uses the weights of ``config``.
            optimizer_path: optimizer state to continue from.
            init_reference_model: whether to keep the initial weights, for a KL term.
            run: precision, gradient clipping and seed. Default: those of a mapping, or
                `RunSettings`.
            backend: ``megatron`` or ``dtensor``, ignored for a mapping.

        Raises:
            ConfigError: a key of the mapping is unknown, or settings are incompatible.
            LayoutError: the layout does not fit the cluster's workers.
        """
        self.cfg = config
        config, run, self.tokenizer, published = read_policy(config, run, tokenizer)
        backend = backend if published is None else published.backend
        check_policy_backend(backend, config)
        super().__init__(
            cluster,
            config,
            config,
            name_prefix,
            backend,
            weights_path,
            optimizer_path,
            parallel=config.parallel,
            workers_per_node=workers_per_node,
            env_vars=None if published is None else published.env_vars,
            tokenizer=self.tokenizer,
            run=run,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
        )
        self._published = published
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
        """Sample responses to right-padded prompts (see ``GenerationOutputSpec``).

        Reads ``input_ids`` int64 [B, S], ``input_lengths`` int64 [B] and ``sample_ids`` int64 [B]
        (default 0, 1, 2, ...). The tokens of a sample depend only on ``seed``, its ``sample_ids``
        entry and its prompt. Without a seed, every call derives a new seed from the run's seed.

        ``sampling_options``: overrides the configured lengths and sampling in this call.
        ``listener``: called with every token that a worker of this process samples, and with the
        row in the worker's share. Raises `ConfigError` without a section ``generation``,
        `DataError` for a missing column.
        """
        if self._published is not None and not self._published.generates:
            raise ConfigError(
                "policy.generation is not set, so that sampling is not configured. Set its "
                "max_new_tokens, temperature, top_p and top_k"
            )
        # Sample on all ranks, and join the shares in the order of the prompts.
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
        check_columns(output, list(GenerationOutputSpec.__annotations__))
        # A published mapping may define the padding.
        if self._published is not None and self._published.pad_token_id is not None:
            position = torch.arange(output["output_ids"].shape[1])
            padding = position >= output["unpadded_sequence_lengths"].cpu()[:, None]
            output["output_ids"].masked_fill_(
                padding.to(output["output_ids"].device), self._published.pad_token_id
            )
        return output

    def recover(self) -> bool:
        """See `GenerationInterface.recover`. False if workers may wait in a collective."""
        parallel = self.model.parallel
        is_collective = parallel.model_parallel_size * parallel.expert > 1
        return not is_collective and self.worker_group.recover()
