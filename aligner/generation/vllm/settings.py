"""Configuration section `generation.vllm`: settings of vLLM engines, and checks of them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import StrictBool

from aligner.architecture import GPTArchitecture
from aligner.catalog import imported
from aligner.config.engine import EngineConfig, EngineResources, EngineStart
from aligner.config.fields import Count, FilePath, Fraction, Positive, Seconds
from aligner.config.parse import refuse


@dataclass(frozen=True)
class VllmConfig(EngineConfig):
    """vLLM engines, each a worker in a separate interpreter."""

    title: ClassVar[str] = "vLLM"
    draws_ahead: ClassVar[bool] = True

    python: FilePath = ".venv-vllm/bin/python"
    """Interpreter of the engines. `make vllm-env` creates it."""

    engines: Count = 1
    """Number of engines. Each engine samples its share of every rollout."""

    tensor_parallel_size: Count = 1
    """Number of devices of an engine, over which its weights are split."""

    refit: Literal["colocated", "separate"] = "colocated"
    """Transfer of weights to an engine.

    `colocated`: the engine shares a machine (on GPUs: a device) with a policy worker, and reads
    shared memory or CUDA IPC. `separate`: broadcast to engines anywhere.
    """

    refit_buffer_mb: Positive = 512.0
    """Maximum size, in MiB, of a group of weights that is transferred together."""

    kv_cache_mb: Count | None = None
    """MiB of KV cache per device. null: 1024 on CPU, from `gpu_memory_utilization` on GPUs."""

    gpu_memory_utilization: Fraction | None = None
    """Share of the device's memory for weights and KV cache. null: 0.5 colocated, 0.9 separate."""

    enforce_eager: StrictBool | None = None
    """Run without compiled graphs. null: true on CPU, false on GPUs."""

    sleep: StrictBool | None = None
    """Release the device's memory, weights included, between rollouts.

    null: true on GPUs if colocated and without `async_rollouts`.
    """

    threads: Count | None = None
    """CPU threads of an engine. null: as many as a training worker."""

    timeout_s: Seconds = 600.0
    """Longest wait for the policy in a separate refit, in seconds."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of `vllm.LLM`."""

    @property
    def workers(self) -> int:
        """Total number of processes: number of engines times processes per engine."""
        return self.engines * self.tensor_parallel_size

    def on_device(self, *, has_gpu: bool, ahead: bool) -> "VllmConfig":
        """Return these settings, with each null replaced by the default for the device.

        ``ahead``: whether rollouts are sampled while the policy trains. Raises `ConfigError` for
        settings that vLLM does not support on CPU.
        """
        problems = []
        if self.sleep and not has_gpu:
            problems.append(
                "generation.vllm.sleep=true: on CPU vLLM cannot release its memory. Set it to null "
                "or false"
            )
        if not has_gpu and min(self.engines, self.tensor_parallel_size) > 1:
            problems.append(
                f"generation.vllm.engines={self.engines} of tensor_parallel_size="
                f"{self.tensor_parallel_size} each: on CPU, two engines on a machine would use the "
                "same name for shared memory. Set one of the keys to 1"
            )
        refuse(problems)
        colocated = self.refit == "colocated"
        return replace(
            self,
            kv_cache_mb=self.kv_cache_mb or (None if has_gpu else 1024),
            gpu_memory_utilization=self.gpu_memory_utilization or (0.5 if colocated else 0.9),
            enforce_eager=not has_gpu if self.enforce_eager is None else self.enforce_eager,
            sleep=has_gpu and colocated and not ahead if self.sleep is None else self.sleep,
        )

    def in_words(self) -> str:
        """Describe settings that `on_device` returned, as text for the log."""
        cache = (
            f"the rest of {self.gpu_memory_utilization:.0%} of it after the weights"
            if self.kv_cache_mb is None
            else f"{self.kv_cache_mb:,} MiB"
        )
        devices = self.tensor_parallel_size
        return (
            f"vLLM: engines {self.engines}, devices of each {devices}, KV cache on a device "
            f"{cache}, {'no compiled' if self.enforce_eager else 'compiled'} graphs, memory "
            f"between rollouts {'released' if self.sleep else 'kept'}"
        )

    def resources(self, *, has_gpu: bool, ahead: bool) -> EngineResources:
        """Return the devices and the memory that the engines need."""
        settings = self.on_device(has_gpu=has_gpu, ahead=ahead)
        return EngineResources(
            title=self.title,
            engines=settings.engines,
            devices_of_each=settings.tensor_parallel_size,
            shares_devices=settings.refit == "colocated",
            refit_buffer_mb=settings.refit_buffer_mb,
            kv_cache_mb=settings.kv_cache_mb,
            memory_share=settings.gpu_memory_utilization or 0.0,
            sleeps=bool(settings.sleep),
        )

    def start(self, arguments: EngineStart) -> Any:
        """Start the engines. The first rollout sends them the policy's weights."""
        return imported("aligner.generation.vllm.generation:VllmGeneration")(*arguments)

    def check_model(self, architecture: GPTArchitecture) -> None:
        """Raise `ConfigError` if the weights have no names in Hugging Face's format."""
        check = "families:config_to_hf" if architecture.has_table else "any_model:names_in_files"
        imported(f"aligner.checkpoint.hf.{check}")(architecture)

    def engine_problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for each setting with which the engines cannot start."""
        # Workers.
        if run.cluster.engine != "ray":
            yield (
                f"cluster.engine={run.cluster.engine} cannot start vLLM's workers, which have "
                "their own interpreter. Set cluster.engine=ray, or generation.backend=megatron"
            )
        policy_workers = run.trainer.world_size
        if self.refit == "colocated" and self.workers > policy_workers:
            size = self.tensor_parallel_size
            devices = f" of tensor_parallel_size={size} each" if size > 1 else ""
            yield (
                f"{key}.engines={self.engines}{devices} with refit=colocated needs a policy worker "
                f"for each of {self.workers} engine workers, but there are {policy_workers}. "
                f"Lower {key}.engines, or set {key}.refit=separate"
            )
        # Arguments and interpreter.
        for name in ("distributed_executor_backend", "tensor_parallel_size"):
            if name in self.kwargs:
                yield (
                    f"{key}.kwargs.{name}={self.kwargs[name]} cannot be set, because this library "
                    f"starts the engine's processes. Set {key}.tensor_parallel_size"
                )
        if self.sleep and run.generation.async_rollouts:
            yield (
                f"{key}.sleep=true releases the engines' memory while the policy trains, but with "
                "generation.async_rollouts=true they sample then. Set sleep to null or false"
            )
        python = Path(self.python).expanduser()
        if not os.access(python, os.X_OK) or python.is_dir():
            yield (
                f"{key}.python={self.python} is not an interpreter. Run `make vllm-env`, which "
                "creates .venv-vllm, or set the interpreter of another environment with vLLM"
            )

    def recording_problems(self, record: str, key: str, run: Any) -> Iterator[str]:
        """Yield a message for settings with which vLLM cannot return the kept tokens."""
        sampling, validation = run.model.ppo.sampling_params, run.validation
        if sampling.top_k == 0 or (validation.top_k == 0 and not validation.use_greedy):
            unbounded = "validation" if sampling.top_k else f"{key}.sampling_params"
            yield (
                f"{record}: vLLM returns kept tokens only if top-k limits their number, but "
                f"{unbounded}.top_k=0. Set top_k to the maximum number of kept tokens, or use "
                "generation.backend=megatron"
            )
        if sampling.use_greedy:
            yield (
                f"{record}: vLLM implements {key}.sampling_params.use_greedy=true as top_k=1, so "
                "that only the sampled token is kept. Set use_greedy=false or record_kept_tokens=0"
            )
