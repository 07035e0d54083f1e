"""`PolicyWorker`, one process of a policy, and `Policy`, which starts and calls the workers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aligner.config import SamplingOptions, TrainedModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.config.translation.nemo_rl import PublishedRole
from aligner.data.tokenizers.loading import as_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.device.counter_hash import CallSeeds
from aligner.distributed.batched_data_dict import BatchedDataDict, check_columns, columns_of
from aligner.distributed.interfaces import Cluster
from aligner.distributed.named_sharding import NamedSharding
from aligner.distributed.workers import phase, run_sharded, scored_rows
from aligner.errors import ConfigError, TokenizerError, raised_as
from aligner.models.gpt.decode.scheduler import TokenListener
from aligner.models.gpt.role.policy import SamplingPolicy
from aligner.models.gpt.role.settings import RunSettings, policy_settings
from aligner.models.handle import RoleHandle
from aligner.models.interfaces import (
    ColocatablePolicyInterface,
    GenerationInterface,
    GenerationOutputSpec,
)
from aligner.models.worker import (
    RoleWorker,
    note_unused,
    passes_over,
    place_of,
    read_published,
    tensors_on_device,
)
from aligner.parallel.groups import ParallelState
from aligner.refit.controller import RefitSource
from aligner.refit.worker import RefitWorker


def read_policy(
    config: TrainedModelConfig | Mapping[str, Any], run: RunSettings | None, tokenizer: Any
) -> tuple[TrainedModelConfig, RunSettings, Tokenizer, PublishedRole | None]:
    """Return the policy's section, run settings, tokenizer, and ``config`` parsed if a mapping.

    If ``config`` is a mapping, its stop tokens become additional end tokens of the tokenizer.
    """
    if isinstance(config, TrainedModelConfig):
        return config, run or RunSettings(), as_tokenizer(tokenizer), None
    published, tokenizer = read_published(config), as_tokenizer(tokenizer)
    if ids := published.stop_token_ids:
        with raised_as(ConfigError, f"policy.generation.stop_token_ids={[*ids]}", TokenizerError):
            tokenizer = tokenizer.with_end_tokens(ids)
    return published.model, run or RunSettings.of(published), tokenizer, published


class PolicyWorker(RefitWorker, RoleWorker[SamplingPolicy]):
    """Worker of `Policy`, which loads the policy from ``config.restore_from_path``.

    For most arguments see `Policy`. ``worker_sharding_annotations``: layout of the workers, which
    must be that of ``config``. ``parallel``: process groups. Default: read from environment
    variables such as RANK. ``kwargs``: ignored arguments of NeMo-RL, which a warning lists.
    """

    def __init__(
        self,
        config: TrainedModelConfig | Mapping[str, Any],
        tokenizer: Tokenizer,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        worker_sharding_annotations: NamedSharding | None = None,
        run: RunSettings | None = None,
        parallel: ParallelState | None = None,
        **kwargs: Any,
    ) -> None:
        note_unused(type(self).__name__, kwargs)
        config, run, tokenizer, _ = read_policy(config, run, tokenizer)
        parallel = place_of(config.parallel, worker_sharding_annotations, parallel, run.seed)
        # The model, and its reference before other weights are loaded.
        settings = policy_settings(config, run)
        model = self.load_model(settings, config.restore_from_path, tokenizer)
        self._seeds = CallSeeds(model.settings.seed)
        self._reference: list[nn.Module] = []
        if init_reference_model:
            model.keep_reference(config.reference_mode)
            self._reference.append(model.reference)
        super().__init__(
            model,
            parallel,
            offloads=config.rollout.offload_weights,
            init_optimizer=init_optimizer,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
        )

    def generate(
        self,
        data: BatchedDataDict,
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: SamplingOptions | None = None,
        listener: TokenListener | None = None,
    ) -> BatchedDataDict:
        """Sample responses to right-padded prompts (see `Policy.generate`).

        ``sample_ids`` default to the row indices in the global batch, of which every data-parallel
        rank must have the same number of rows. All workers must be called equally often.
        """
        check_columns(data, ("input_ids", "input_lengths"))
        seed = self._seeds.next() if seed is None else seed
        # Outside of the generation phase, enter the phase for this call.
        if not self.model.is_ready_to_generate:
            self.prepare_for_generation()
            try:
                return self.generate(
                    data, greedy, seed=seed, sampling_options=sampling_options, listener=listener
                )
            finally:
                self.finish_generation()
        # Sample responses to this rank's prompts.
        batch = tensors_on_device(data)
        ids = batch["input_ids"]
        first = self.parallel.dp_rank * ids.shape[0]
        output = self.model.generator.sample(
            ids,
            batch["input_lengths"],
            batch.get("sample_ids", first + torch.arange(ids.shape[0], device=ids.device)),
            seed=seed,
            greedy=greedy or None,
            sampling_options=sampling_options,
            listener=listener,
        )
        optional = {} if output.kept_ids is None else {"kept_ids": output.kept_ids}
        return BatchedDataDict(
            {
                "output_ids": output.tokens,
                "generation_lengths": output.lengths - output.prompt_lengths,
                "unpadded_sequence_lengths": output.lengths,
                "logprobs": output.logprobs,
                "is_end": output.is_end,
                **optional,
            }
        )

    def get_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Compute log-probs of ``input_ids`` under the current weights.

        Reads ``input_ids`` int64 [B, S], ``input_lengths`` int64 [B] and ``token_mask`` float32
        [B, S], 1 for tokens to score. Without a mask, `Policy` scores every token but the first.
        Optional: ``kept_ids`` int32 [B, S, K], the ids that top-k and top-p kept.
        ``micro_batch_size``: number of sequences per forward pass. Returns ``logprobs`` float32
        [B, S]. Column t is the log-prob of token t, 0 for t = 0 and where the mask is 0.
        """
        logprobs = self.model.get_logprobs(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"logprobs": logprobs})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Compute ``reference_logprobs``, as `get_logprobs` under the initial weights."""
        logprobs = self.model.get_reference_logprobs(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"reference_logprobs": logprobs})

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, vocab_size: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Return the ``k`` most likely of the first ``vocab_size`` tokens at each position.

        Reads the columns of `get_logprobs`. Returns ``topk_logits`` float32 [B, S, k], divided by
        the sampling temperature and in descending order, and ``topk_indices`` int64 [B, S, k].
        Column t contains the candidates for token t, 0 for t = 0 and where the mask is 0.
        """
        batch, passes = passes_over(data, micro_batch_size)
        logits, ids = self.model.get_topk_logits(batch, k, vocab_size, passes)
        return BatchedDataDict({"topk_logits": logits, "topk_indices": ids})

    # Weights for sampling engines -------------------------------------------------------------

    def hf_weight_names(self) -> Sequence[str]:
        """Return Hugging Face's names of all weights, from the first layer to the last."""
        return list(self.model.hugging_face_weights())

    def hf_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of each weight. All workers of a model must read them all."""
        weights = self.model.hugging_face_weights()
        return ((name, weights[name]) for name in names)

    # Phases -----------------------------------------------------------------------------------

    prepare_for_lp_inference = RoleWorker.prepare_for_inference  # `finish_inference` ends it

    def prepare_for_generation(self) -> bool:
        """Move weights to the device, and make the model ready to generate. Returns True."""
        self._restore_weights()
        self.model.prepare_for_generation()
        return True

    def finish_generation(self) -> bool:
        """Free the memory of generation (with ``offload_weights`` all memory). Returns True."""
        self.model.finish_generation()
        self._park()
        accelerator.release_memory()
        return True

    def offload_before_refit(self) -> None:
        """Move weights to the device, and free other memory for an engine on the same device."""
        self.prepare_for_inference()
        super().offload_before_refit()

    def offload_after_refit(self) -> None:
        """Free the offered weights. With ``offload_weights``, move all memory to the host."""
        super().offload_after_refit()
        self._park()

    def _modules_with_weights(self) -> list[nn.Module]:
        return [*super()._modules_with_weights(), *self._reference]


class MegatronPolicyWorker(PolicyWorker):
    """Worker of `Policy` on megatron-core."""

    model_path = "aligner.models.gpt.megatron.actor:MegatronGPTActorModel"


class DTensorPolicyWorkerV2(PolicyWorker):
    """Worker of `Policy` on a transformers model, sharded by FSDP2."""

    model_path = "aligner.models.gpt.dtensor.actor:DTensorActorModel"


GENERATION_COLUMNS = ("input_ids", "input_lengths", "sample_ids")
LOGPROB_COLUMNS = ("input_ids", "input_lengths", "token_mask")


class Policy(RoleHandle, RefitSource, ColocatablePolicyInterface, GenerationInterface):
    """A language-model policy that samples, scores tokens, and trains."""

    workers: ClassVar[Mapping[str, str]] = {
        "megatron": "aligner.models.policy.lm_policy.MegatronPolicyWorker",
        "dtensor": "aligner.models.policy.lm_policy.DTensorPolicyWorkerV2",
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
            config: the policy's section of a configuration, or a mapping with the keys of
                `PolicyConfig`, which also sets the backend and the workers' environment.
            tokenizer: a tokenizer of this library or of transformers.
            name_prefix: name of the role in messages and log names.
            workers_per_node: on Ray, number of workers on each node, or a list with one number for
                each node. Default: all bundles of the cluster.
            init_optimizer: whether to create an optimizer. False for a frozen policy.
            weights_path: weights from `save_checkpoint` to continue from. The reference policy
                still uses the weights of ``config``.
            optimizer_path: optimizer state to continue from.
            init_reference_model: whether to keep the initial weights as a reference policy.
            run: precision, gradient clipping and seed. Default: the settings in a mapping, or
                `RunSettings`.
            backend: ``megatron`` or ``dtensor``, ignored for a mapping.

        Raises:
            ConfigError: a key of the mapping is unknown, or settings are incompatible.
            LayoutError: the layout does not fit the number of workers.
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

    def weights_changed(self) -> None:
        """Do nothing, because the policy samples with the weights that it trains."""

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
        (default 0, 1, 2, ...). The tokens of a sample depend only on ``seed``, its sample id and
        its prompt. Without ``seed``, every call derives a new seed from the run's seed.

        ``sampling_options``: length limits and sampling for this call. ``listener``: called with
        each token that a worker in this process samples, and the row among the worker's prompts.
        Raises `ConfigError` without a section ``generation``, `DataError` for a missing column.
        """
        if self._published is not None and not self._published.generates:
            raise ConfigError(
                "policy.generation is not set, and configures sampling. Set max_new_tokens, "
                "temperature, top_p and top_k in it"
            )
        # Sample on all ranks, and concatenate their responses in the order of the prompts.
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
        """Return whether `generate` may be called again: if no worker waits in a collective."""
        parallel = self.model.parallel
        is_collective = parallel.model_parallel_size * parallel.expert > 1
        return not is_collective and self.worker_group.recover()
