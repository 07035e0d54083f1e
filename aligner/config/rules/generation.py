"""Checks of the generation engines against the rest of a run."""

import os
from pathlib import Path

from aligner.config.generation import VllmConfig
from aligner.config.run import SamplingRunConfig
from aligner.errors import ConfigError


def check_generation(config: SamplingRunConfig) -> None:
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
    _check_engines(generation.vllm, config.trainer.world_size)
    if generation.vllm.sleep and generation.async_rollouts:
        raise ConfigError(
            "generation.vllm.sleep=true gives the engines' memory back while the policy trains, "
            "and with generation.async_rollouts=true they draw then; set sleep to null or false"
        )
    python = Path(generation.vllm.python).expanduser()
    if not os.access(python, os.X_OK) or python.is_dir():
        raise ConfigError(
            f"generation.vllm.python={generation.vllm.python}: there is no such interpreter; "
            "`make vllm-env` makes .venv-vllm, or give that of another environment with vLLM"
        )


def _check_engines(vllm: VllmConfig, policy_workers: int) -> None:
    if vllm.refit == "colocated" and vllm.workers > policy_workers:
        of_each = vllm.tensor_parallel_size
        devices = f" of tensor_parallel_size={of_each} each" if of_each > 1 else ""
        raise ConfigError(
            f"generation.vllm.engines={vllm.engines}{devices} with refit=colocated needs a policy "
            f"worker beside each of {vllm.workers} engine workers, and there are {policy_workers}; "
            "lower it, or set generation.vllm.refit=separate"
        )
    for name in sorted({"tensor_parallel_size", "distributed_executor_backend"} & {*vllm.kwargs}):
        raise ConfigError(
            f"generation.vllm.kwargs.{name}={vllm.kwargs[name]}: who starts an engine's processes "
            "is the library's to say; set generation.vllm.tensor_parallel_size"
        )


def _check_async(config: SamplingRunConfig) -> None:
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
    ppo = config.model.ppo
    if ppo.truncated_importance_sampling is None and not ppo.correction.is_on:
        raise ConfigError(
            "generation.async_rollouts=true draws with weights one update old, which "
            "model.ppo.truncated_importance_sampling=null and an empty model.ppo.correction leave "
            "uncorrected; set model.ppo.correction.weights=token (with ratio_level=sequence: "
            "sequence), or model.ppo.correction.old_logprobs=sampler (docs/corrections.md)"
        )
