"""Who draws the responses: the training weights themselves, or engines that are given a copy."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aligner.config.fields import Count, FilePath, Fraction, Positive, Seconds
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.run import SamplingRunConfig


@dataclass(frozen=True)
class VllmConfig:
    """vLLM engines, each a worker in an interpreter of its own."""

    python: FilePath = ".venv-vllm/bin/python"  # the interpreter; `make vllm-env` makes it
    engines: Count = 1  # each draws its share of every rollout
    # How weights reach an engine. colocated: it shares a machine (on GPUs: a device) with a policy
    # worker, through shared memory or CUDA IPC; separate: broadcast to engines anywhere.
    refit: Literal["colocated", "separate"] = "colocated"
    refit_buffer_mb: Positive = 512.0  # weights are handed over in groups of at most so much
    kv_cache_mb: Count | None = 1024  # per engine; null: what gpu_memory_utilization leaves
    gpu_memory_utilization: Fraction = 0.5  # of the device, the engine's weights included
    enforce_eager: bool = True  # no compiled graphs: a quick start, and all there is on CPU
    threads: Count | None = None  # CPU threads of an engine; null: as a training worker has
    timeout_s: Seconds = 600.0  # longest wait for the other side of a separate refit
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # any further ones of vllm.LLM


@dataclass(frozen=True)
class GenerationConfig:
    """How responses are drawn."""

    backend: Literal["megatron", "vllm"] = "megatron"  # megatron: the training weights themselves
    # megatron, on GPUs: one launch a token of all sequences, where a process holds a dense model.
    cuda_graphs: bool = True
    # While a step trains, draw the next step's rollout, with the weights from before the update.
    async_rollouts: bool = False
    # What becomes of such a rollout where a validation needs the new weights or the run state is
    # saved. finish: waited for, and saved; abandon: drawn again, with the new weights.
    in_flight: Literal["finish", "abandon"] = "finish"
    vllm: VllmConfig = field(default_factory=VllmConfig)


def check_generation(config: "SamplingRunConfig") -> None:
    """Refuse what no engine can do, before anything is loaded."""
    generation = config.generation
    if generation.async_rollouts:
        _check_async(config)
    if generation.backend != "vllm":
        return
    if config.cluster.engine != "ray":
        raise ConfigError(
            f"generation.backend=vllm needs cluster.engine=ray, which starts vLLM's workers in "
            f"their own interpreter; it is {config.cluster.engine}. Set cluster.engine=ray, or "
            "generation.backend=megatron"
        )
    if generation.vllm.refit == "colocated" and generation.vllm.engines > config.trainer.world_size:
        raise ConfigError(
            f"generation.vllm.engines={generation.vllm.engines} with refit=colocated needs a "
            f"policy worker beside each engine, and there are {config.trainer.world_size}; lower "
            "it, or set generation.vllm.refit=separate"
        )
    python = Path(generation.vllm.python).expanduser()
    if not os.access(python, os.X_OK) or python.is_dir():
        raise ConfigError(
            f"generation.vllm.python={generation.vllm.python}: there is no such interpreter; "
            "`make vllm-env` makes .venv-vllm, or give that of another environment with vLLM"
        )


def _check_async(config: "SamplingRunConfig") -> None:
    from aligner.config.run import RunConfig

    if config.generation.backend == "megatron":
        raise ConfigError(
            "generation.async_rollouts=true needs an engine that draws while the policy trains, "
            "and generation.backend=megatron draws with the policy's own workers; set "
            "generation.backend=vllm"
        )
    if not isinstance(config, RunConfig):
        return
    if config.trainer.ppo.dynamic_sampling.enabled:
        raise ConfigError(
            "generation.async_rollouts=true draws one rollout ahead, and with "
            "trainer.ppo.dynamic_sampling.enabled=true nobody knows how many a step takes; set one "
            "of them to false"
        )
    if config.model.ppo.truncated_importance_sampling is None:
        raise ConfigError(
            "generation.async_rollouts=true draws with weights one update old, which "
            "model.ppo.truncated_importance_sampling=null leaves uncorrected; set it to 2.0"
        )
