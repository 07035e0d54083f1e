"""`VllmGeneration`: handle with which the trainer calls vLLM engines in other processes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from aligner.architecture import GPTArchitecture
from aligner.config import SamplingOptions, SamplingRunConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device.counter_hash import CallSeeds
from aligner.distributed.batched_data_dict import BatchedDataDict, columns_of
from aligner.distributed.interfaces import Cluster
from aligner.distributed.named_sharding import layout_of
from aligner.distributed.workers import run_on_all, run_sharded, scored_rows
from aligner.errors import ConfigError
from aligner.generation.vllm.engine import EngineArguments
from aligner.generation.vllm.settings import VllmConfig
from aligner.generation.vllm.worker import VllmWorker
from aligner.models.interfaces import BackgroundGeneration
from aligner.refit.controller import Refit, RefitSource

WORKER = "aligner.generation.vllm.worker.VllmWorker"
GENERATION_COLUMNS = ("input_ids", "input_lengths", "sample_ids")


class VllmGeneration(BackgroundGeneration):
    """Handle of vLLM engines with the policy's weights. Each samples a part of every rollout."""

    model = None  # no token budgets: an engine forms its own micro-batches
    get_logprobs = scored_rows(VllmWorker.get_logprobs, ("input_ids", "input_lengths"))

    def __init__(
        self,
        cluster: Cluster,
        config: SamplingRunConfig,
        tokenizer: Tokenizer,
        architecture: GPTArchitecture,
        policy: RefitSource,
        max_sequence_length: int,
        name_prefix: str = "vllm",
    ) -> None:
        """Start the engines on ``cluster``. The first rollout sends them ``policy``'s weights.

        Raises `CheckpointError` if no Hugging Face family can express ``architecture``. If an
        engine fails to start, for example in `aligner.refit.ends`, the first call raises its error.
        """
        # Settings that depend on the device. Errors are raised before an engine starts.
        settings = config.generation.engine
        assert isinstance(settings, VllmConfig)
        settings.check_model(architecture)
        self.tokenizer = tokenizer
        self._settings = settings.on_device(
            has_gpu=cluster.use_gpus, ahead=config.generation.async_rollouts
        )
        _check_allocator(self._settings, cluster.use_gpus, config.cluster.env_vars)
        meeting_place = None
        if self._settings.tensor_parallel_size > 1:
            meeting_place = policy.open_meeting_place(self._settings.timeout_s)
        # Workers in the engines' interpreter.
        rollout = config.model.rollout
        self.worker_group = cluster.start_workers(
            WORKER,
            name_prefix,
            layout=layout_of(1, self._settings.engines, 1, self._settings.tensor_parallel_size),
            python_executable=str(Path(self._settings.python).expanduser().absolute()),
            arguments=EngineArguments(
                architecture=architecture,
                precision=config.trainer.precision,
                eos_ids=tokenizer.with_end_tokens(rollout.sampling_params.end_tokens).end_ids,
                length=rollout.length_params,
                sampling=rollout.sampling_params,
                max_batch_size=rollout.rollout_micro_batch_size,
                max_sequence_length=min(max_sequence_length, architecture.max_position_embeddings),
                settings=self._settings,
                record_kept=getattr(rollout, "record_kept_tokens", 0),
            ),
            tokenizer_files=tokenizer.files(),
            pad_id=tokenizer.pad_id,
            weights_from=policy.refit_ends(),
            meeting_place=meeting_place,
        )
        # The first rollout sends the weights.
        self._stale = True
        self._seeds = CallSeeds(config.seed)
        self._refit = Refit(
            policy,
            self.worker_group,
            separate=self._settings.refit == "separate",
            buffer_bytes=int(self._settings.refit_buffer_mb * 2**20),
            world_size=1 + self._settings.workers,
            timeout_s=self._settings.timeout_s,
        )

    def in_words(self) -> str:
        """Describe the device settings of the engines."""
        return self._settings.in_words()

    # Sampling ---------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Mark the engines' weights as old, so that `prepare_for_generation` replaces them."""
        self._stale = True

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Send the policy's weights to the engines, unless these already have them."""
        if self._stale:
            self._refit()
            self._stale = False
        return True

    def generate(
        self,
        data: BatchedDataDict,
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """Continue the right-padded prompts in ``input_ids`` (see ``GenerationOutputSpec``).

        Each response has its own seed, computed from ``seed`` and its entry of ``sample_ids``.
        Optional columns and ``seed`` have the defaults of `Policy.generate`. ``sampling_options``
        replaces the configured lengths and sampling.
        """
        seed = self._seeds.next() if seed is None else seed
        return self.generate_in_background(
            data, seed=seed, greedy=greedy, sampling_options=sampling_options
        ).result()

    def recover(self) -> bool:
        """See `GenerationInterface.recover`. An engine with several processes cannot recover."""
        if self._settings.tensor_parallel_size > 1 or not self.worker_group.recover():
            return False
        self.abandon()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release the engines' memory, weights included, if `sleep` is configured."""
        if self._settings.sleep:
            run_on_all(self.worker_group, VllmWorker.sleep)
            self._stale = True
        return True

    def generate_in_background(
        self, data: BatchedDataDict, *, seed: int = 0, **options: Any
    ) -> Self:
        """Begin `generate` without waiting. Only one batch can be in flight.

        Returns this handle, whose `result` and `abandon` end the batch.
        """
        rows = columns_of(data, GENERATION_COLUMNS)
        run_sharded(self.worker_group, VllmWorker.start_generation, rows, seed=seed, **options)
        return self

    def result(self) -> BatchedDataDict:
        """Wait for the batch in flight (see ``GenerationOutputSpec``)."""
        results = run_on_all(self.worker_group, VllmWorker.collect_generation)
        # All processes of an engine return the same batch.
        return BatchedDataDict.from_batches(
            results[:: self._settings.tensor_parallel_size],
            pad_value_dict={"output_ids": self.tokenizer.pad_id},
        )

    def abandon(self) -> None:
        """Abandon the batch in flight."""
        run_on_all(self.worker_group, VllmWorker.abandon_generation)

    def shutdown(self) -> bool:
        """Shut the engines down."""
        return self.worker_group.shutdown(cleanup_method="shutdown")


def _check_allocator(settings: VllmConfig, on_gpus: bool, env_vars: Mapping[str, Any]) -> None:
    """Raise if expandable segments are enabled, which CUDA IPC and `sleep` do not support."""
    if not on_gpus or (settings.refit == "separate" and not settings.sleep):
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = str(env_vars.get(name, os.environ.get(name, "")))
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            raise ConfigError(
                f"{name}={value} (of the driver, or in cluster.env_vars): engines that share the "
                "policy's GPU or sleep do not support expandable segments. Remove it, or set "
                "generation.vllm.refit=separate"
            )
