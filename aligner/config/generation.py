"""Sampling of the responses: with the training weights, or by engines that receive a copy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aligner.config.fields import Count, FilePath, Fraction, Positive, Seconds
from aligner.errors import ConfigError


@dataclass(frozen=True)
class VllmConfig:
    """vLLM engines, each a worker in an interpreter of its own."""

    python: FilePath = ".venv-vllm/bin/python"  # the interpreter; `make vllm-env` makes it
    engines: Count = 1  # each draws its share of every rollout
    tensor_parallel_size: Count = 1  # devices of an engine, a worker on each
    # How weights reach an engine. colocated: it shares a machine (on GPUs: a device) with a policy
    # worker, through shared memory or CUDA IPC; separate: broadcast to engines anywhere.
    refit: Literal["colocated", "separate"] = "colocated"
    refit_buffer_mb: Positive = 512.0  # weights are handed over in groups of at most so much
    # Per device; null: 1024 on CPU, on GPUs what gpu_memory_utilization leaves.
    kv_cache_mb: Count | None = None
    # Of the device, the engine's weights included; null: 0.5 where colocated, 0.9 where separate.
    gpu_memory_utilization: Fraction | None = None
    enforce_eager: bool | None = None  # no compiled graphs; null: true on CPU, false on GPUs
    # Give the device's memory back between rollouts, weights included; null: on GPUs, where
    # colocated and not async_rollouts.
    sleep: bool | None = None
    threads: Count | None = None  # CPU threads of an engine; null: as a training worker has
    timeout_s: Seconds = 600.0  # longest wait for the other side of a separate refit
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # any further ones of vllm.LLM

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


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling of responses."""

    backend: Literal["megatron", "vllm"] = "megatron"  # megatron: the training weights themselves
    # megatron, on GPUs: one launch a token of all sequences, where a process holds a dense model.
    cuda_graphs: bool = True
    # While a step trains, draw the next step's rollout, with the weights from before the update.
    async_rollouts: bool = False
    # What becomes of such a rollout where a validation needs the new weights or the run state is
    # saved. finish: waited for, and saved; abandon: drawn again, with the new weights.
    in_flight: Literal["finish", "abandon"] = "finish"
    vllm: VllmConfig = field(default_factory=VllmConfig)
