"""`PolicyWorker`, one process's share of a policy on any backend."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aligner.compat.nemo_rl import PublishedRole
from aligner.config import SamplingOptions, TrainedModelConfig
from aligner.data.tokenizers.loading import as_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.device.counter_hash import CallSeeds
from aligner.distributed.batched_data_dict import BatchedDataDict, check_columns
from aligner.distributed.named_sharding import NamedSharding
from aligner.errors import ConfigError, TokenizerError, raised_as
from aligner.models.gpt.decode.scheduler import TokenListener
from aligner.models.gpt.role.policy import SamplingPolicy
from aligner.models.gpt.role.settings import RunSettings, policy_settings
from aligner.models.worker import (
    RoleWorker,
    note_unused,
    passes_over,
    place_of,
    read_published,
    tensors_on_device,
)
from aligner.parallel.groups import ParallelState
from aligner.refit.worker import RefitWorker


def read_policy(
    config: TrainedModelConfig | Mapping[str, Any], run: RunSettings | None, tokenizer: Any
) -> tuple[TrainedModelConfig, RunSettings, Tokenizer, PublishedRole | None]:
    """Return the policy's section, run settings, tokenizer and published mapping, if any.

    The end tokens of a mapping are added to the tokenizer's.
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
    must agree with ``config``. ``parallel``: layout and groups of this process. Default: from RANK
    and related environment variables. ``kwargs``: ignored published arguments, listed in a warning.
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

        Default of ``sample_ids``: the rows' indices in the global batch, of which every
        data-parallel rank has an equal share. Workers that generate together must be called equally
        often.
        """
        check_columns(data, ("input_ids", "input_lengths"))
        seed = self._seeds.next() if seed is None else seed
        # Outside of the generation phase, enter it for this call.
        if not self.model.is_ready_to_generate:
            self.prepare_for_generation()
            try:
                return self.generate(
                    data, greedy, seed=seed, sampling_options=sampling_options, listener=listener
                )
            finally:
                self.finish_generation()
        # Sample this rank's share.
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
        [B, S], 1 for tokens to score (a handle's default: every token but the first). Optional:
        ``kept_ids`` int32 [B, S, K], the ids that top-k and top-p kept. ``micro_batch_size``:
        sequences per forward pass, default as configured. Returns ``logprobs`` float32 [B, S]:
        position t is the log-prob of token t, 0 at t = 0 and where the mask is 0.
        """
        logprobs = self.model.get_logprobs(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"logprobs": logprobs})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Compute `get_logprobs` under the initial weights, as ``reference_logprobs``."""
        logprobs = self.model.get_reference_logprobs(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"reference_logprobs": logprobs})

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, vocab_size: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Return the ``k`` most likely of the first ``vocab_size`` tokens at each position.

        Reads the columns of `get_logprobs`. Returns ``topk_logits`` float32 [B, S, k], divided by
        the sampling temperature and in descending order, and ``topk_indices`` int64 [B, S, k].
        Position t is for token t, 0 at t = 0 and where the mask is 0.
        """
        batch, passes = passes_over(data, micro_batch_size)
        logits, ids = self.model.get_topk_logits(batch, k, vocab_size, passes)
        return BatchedDataDict({"topk_logits": logits, "topk_indices": ids})

    # Weights for sampling engines -------------------------------------------------------------

    def hf_weight_names(self) -> Sequence[str]:
        """Return the names of all weights, as in a Hugging Face state dict, in depth order."""
        return list(self.model.hugging_face_weights())

    def hf_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors on every worker. All workers that share the model must iterate."""
        weights = self.model.hugging_face_weights()
        return ((name, weights[name]) for name in names)

    # Phases -----------------------------------------------------------------------------------

    prepare_for_lp_inference = RoleWorker.prepare_for_inference  # `finish_inference` ends it

    def prepare_for_generation(self) -> bool:
        """Move weights to the device and prepare to generate. Returns True."""
        self._restore_weights()
        self.model.prepare_for_generation()
        return True

    def finish_generation(self) -> bool:
        """Release generation's memory, with ``offload_weights`` all memory. Returns True."""
        self.model.finish_generation()
        self._park()
        accelerator.release_memory()
        return True

    def offload_before_refit(self) -> None:
        """Move weights to the device, and free memory on a device that the engine shares."""
        self.prepare_for_inference()
        super().offload_before_refit()

    def offload_after_refit(self) -> None:
        """Invalidate the handles. With ``offload_weights`` all memory moves to the host."""
        super().offload_after_refit()
        self._park()

    def _modules_with_weights(self) -> list[nn.Module]:
        """Return the policy's model, and the reference model if it is separate."""
        return [*super()._modules_with_weights(), *self._reference]


class MegatronPolicyWorker(PolicyWorker):
    """Worker of `Policy` on megatron-core."""

    model_path = "aligner.models.gpt.megatron.actor:MegatronGPTActorModel"


class DTensorPolicyWorkerV2(PolicyWorker):
    """Worker of `Policy` on a transformers model, as FSDP2 and DTensors."""

    model_path = "aligner.models.gpt.dtensor.actor:DTensorActorModel"
