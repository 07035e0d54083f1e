"""Section `generation.vllm`: settings of vLLM engines, and the rules that they must meet."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import StrictBool

from aligner.catalog import imported
from aligner.config.engine import EngineConfig, EngineResources, EngineStart
from aligner.config.fields import Count, FilePath, Fraction, Positive, Seconds
from aligner.errors import ConfigError


@dataclass(frozen=True)
class VllmConfig(EngineConfig):
    """vLLM engines, each a worker in an interpreter of its own."""

    title: ClassVar[str] = "vLLM"
    draws_ahead: ClassVar[bool] = True

    python: FilePath = ".venv-vllm/bin/python"
    """Interpreter of the engines; `make vllm-env` makes it."""

    engines: Count = 1
    """Engines; each draws its share of every rollout."""

    tensor_parallel_size: Count = 1
    """Devices of an engine, over which its weights are split."""

    refit: Literal["colocated", "separate"] = "colocated"
    """Way of the weights to an engine.

    `colocated`: it shares a machine (on GPUs: a device) with a policy worker, through shared memory
    or CUDA IPC. `separate`: broadcast to engines anywhere.
    """

    refit_buffer_mb: Positive = 512.0
    """Weights are handed over in groups of at most so much."""

    kv_cache_mb: Count | None = None
    """KV cache on a device; null: 1024 on CPU, on GPUs what `gpu_memory_utilization` leaves."""

    gpu_memory_utilization: Fraction | None = None
    """Share of the device, weights included; null: 0.5 colocated, 0.9 separate."""

    enforce_eager: StrictBool | None = None
    """No compiled graphs; null: true on CPU, false on GPUs."""

    sleep: StrictBool | None = None
    """Give memory back between rollouts; null: on GPUs, colocated, not `async_rollouts`.

    The device's memory, weights included.
    """

    threads: Count | None = None
    """CPU threads of an engine; null: as a training worker has."""

    timeout_s: Seconds = 600.0
    """Longest wait for the other side of a separate refit, in seconds."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Any further arguments of `vllm.LLM`."""

    @property
    def workers(self) -> int:
        """Processes of all engines."""
        return self.engines * self.tensor_parallel_size

    def on_device(self, *, has_gpu: bool, ahead: bool) -> "VllmConfig":
        """These settings with what goes by the device filled in.

        ``ahead``: rollouts are drawn while the policy trains.

        Raises:
            ConfigError: on CPU ``sleep``, or several engines of several processes, which vLLM
                does not have there.
        """
        if self.sleep and not has_gpu:
            raise ConfigError(
                "generation.vllm.sleep=true: on CPU vLLM cannot give its memory back; set it to "
                "null or false"
            )
        if not has_gpu and min(self.engines, self.tensor_parallel_size) > 1:
            raise ConfigError(
                f"generation.vllm.engines={self.engines} of tensor_parallel_size="
                f"{self.tensor_parallel_size} each: vLLM's CPU build gives the memory that an "
                "engine's processes share the same name in all engines of a machine; set one of "
                "them to 1"
            )
        colocated = self.refit == "colocated"
        return replace(
            self,
            kv_cache_mb=self.kv_cache_mb or (None if has_gpu else 1024),
            gpu_memory_utilization=self.gpu_memory_utilization or (0.5 if colocated else 0.9),
            enforce_eager=not has_gpu if self.enforce_eager is None else self.enforce_eager,
            sleep=has_gpu and colocated and not ahead if self.sleep is None else self.sleep,
        )

    def in_words(self) -> str:
        """Description of the engines' settings, as `on_device` returned them."""
        cache = (
            f"what its weights leave of {self.gpu_memory_utilization:.0%} of it"
            if self.kv_cache_mb is None
            else f"{self.kv_cache_mb:,} MiB"
        )
        devices = self.tensor_parallel_size
        return (
            f"vLLM: engines {self.engines}, devices of each {devices}, KV cache on a device "
            f"{cache}; {'no compiled' if self.enforce_eager else 'compiled'} graphs; between "
            f"rollouts its memory {'is given back' if self.sleep else 'is kept'}"
        )

    def resources(self, *, has_gpu: bool, ahead: bool) -> EngineResources:
        """Devices and memory of the engines."""
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

    def start(self, given: EngineStart) -> Any:
        """Start the engines; the first rollout brings them the policy's weights."""
        return imported("aligner.generation.vllm.generation:VllmGeneration")(*given)

    def engine_problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse engines that cannot be started."""
        if run.cluster.engine != "ray":
            yield (
                "generation.backend=vllm needs cluster.engine=ray, which starts vLLM's workers in "
                f"their own interpreter; it is {run.cluster.engine}. Set cluster.engine=ray, or "
                "generation.backend=megatron"
            )
        policy_workers = run.trainer.world_size
        if self.refit == "colocated" and self.workers > policy_workers:
            of_each = self.tensor_parallel_size
            devices = f" of tensor_parallel_size={of_each} each" if of_each > 1 else ""
            yield (
                f"{key}.engines={self.engines}{devices} with refit=colocated needs a policy worker "
                f"beside each of {self.workers} engine workers, and there are {policy_workers}; "
                f"lower it, or set {key}.refit=separate"
            )
        for name in ("distributed_executor_backend", "tensor_parallel_size"):
            if name in self.kwargs:
                yield (
                    f"{key}.kwargs.{name}={self.kwargs[name]}: who starts an engine's processes is "
                    f"the library's to say; set {key}.tensor_parallel_size"
                )
        if self.sleep and run.generation.async_rollouts:
            yield (
                f"{key}.sleep=true gives the engines' memory back while the policy trains, and "
                "with generation.async_rollouts=true they draw then; set sleep to null or false"
            )
        python = Path(self.python).expanduser()
        if not os.access(python, os.X_OK) or python.is_dir():
            yield (
                f"{key}.python={self.python}: there is no such interpreter; `make vllm-env` makes "
                ".venv-vllm, or give that of another environment with vLLM"
            )

    def recording_problems(self, record: str, key: str, run: Any) -> Iterator[str]:
        """Refuse to record what vLLM's sampling masks do not have (docs/corrections.md)."""
        sampling, validation = run.model.ppo.sampling_params, run.validation
        if sampling.top_k == 0 or (validation.top_k == 0 and not validation.use_greedy):
            unbounded = "validation" if sampling.top_k else f"{key}.sampling_params"
            yield (
                f"{record}: vLLM says what it kept only where top-k bounds it, and "
                f"{unbounded}.top_k=0; set it to the most tokens that may be kept, or "
                "generation.backend=megatron"
            )
        if sampling.use_greedy:
            yield (
                f"{record}: vLLM takes {key}.sampling_params.use_greedy=true for top_k=1 there, so "
                "that a set would be the token alone; set it to false, or the former to 0"
            )
