"""Sampling of the responses: with the training weights, or by engines that receive a copy."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StrictBool

from aligner.config.combinations import ReadIf
from aligner.config.fields import Count, FilePath, Fraction, Positive, Seconds
from aligner.errors import ConfigError


@dataclass(frozen=True)
class VllmConfig:
    """vLLM engines, each a worker in an interpreter of its own."""

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


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling of responses."""

    backend: Literal["megatron", "vllm"] = "megatron"
    """Sampling by the policy's own workers, or by engines with a copy.

    `megatron`: the former. `vllm`: vLLM engines, brought up to date before every rollout; needs
    `cluster.engine=ray` (docs/vllm.md).
    """

    cuda_graphs: StrictBool = True
    """`megatron` on GPUs: one launch a token of all sequences, not hundreds.

    A step of decoding is launched as one CUDA graph, where a process holds the whole of a dense
    model (no tensor, pipeline or expert parallelism). Graphs are kept between
    rollouts, with the cache of keys and values that they read, where that takes at most 1/32 of the
    device; else they are given back after each. The tokens are the same without.
    """

    async_rollouts: StrictBool = False
    """Draw the next step's rollout while this one trains, with the weights from before.

    Needs `vllm` and a correction: `truncated_importance_sampling` or the section `correction` of
    `model.ppo` (docs/corrections.md).
    """

    in_flight: Literal["finish", "abandon"] = "finish"
    """Fate of such a rollout when a validation or a save comes between.

    `finish`: waited for and saved. `abandon`: drawn again, with the new weights.
    """

    vllm: Annotated[
        VllmConfig,
        ReadIf(lambda run: run.generation.backend == "vllm", "needs generation.backend=vllm"),
    ] = field(default_factory=VllmConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse engines that cannot be started, and old weights without a correction."""
        if self.async_rollouts:
            yield from self._async_problems(key, run)
        if self.backend == "vllm":
            if run.cluster.engine != "ray":
                yield (
                    f"{key}.backend=vllm needs cluster.engine=ray, which starts vLLM's workers in "
                    f"their own interpreter; it is {run.cluster.engine}. Set cluster.engine=ray, "
                    f"or {key}.backend=megatron"
                )
            yield from self._vllm_problems(f"{key}.vllm", run.trainer.world_size)

    def _vllm_problems(self, key: str, policy_workers: int) -> Iterator[str]:
        vllm = self.vllm
        if vllm.refit == "colocated" and vllm.workers > policy_workers:
            of_each = vllm.tensor_parallel_size
            devices = f" of tensor_parallel_size={of_each} each" if of_each > 1 else ""
            yield (
                f"{key}.engines={vllm.engines}{devices} with refit=colocated needs a policy worker "
                f"beside each of {vllm.workers} engine workers, and there are {policy_workers}; "
                f"lower it, or set {key}.refit=separate"
            )
        for name in ("distributed_executor_backend", "tensor_parallel_size"):
            if name in vllm.kwargs:
                yield (
                    f"{key}.kwargs.{name}={vllm.kwargs[name]}: who starts an engine's processes is "
                    f"the library's to say; set {key}.tensor_parallel_size"
                )
        if vllm.sleep and self.async_rollouts:
            yield (
                f"{key}.sleep=true gives the engines' memory back while the policy trains, and "
                "with generation.async_rollouts=true they draw then; set sleep to null or false"
            )
        python = Path(vllm.python).expanduser()
        if not os.access(python, os.X_OK) or python.is_dir():
            yield (
                f"{key}.python={vllm.python}: there is no such interpreter; `make vllm-env` makes "
                ".venv-vllm, or give that of another environment with vLLM"
            )

    def _async_problems(self, key: str, run: Any) -> Iterator[str]:
        if self.backend == "megatron":
            yield (
                f"{key}.async_rollouts=true needs an engine that draws while the policy trains, "
                f"and {key}.backend=megatron draws with the policy's own workers; set "
                f"{key}.backend=vllm"
            )
        ppo = getattr(run.model, "ppo", None)
        if ppo is None:
            return
        if run.trainer.ppo.dynamic_sampling.enabled:
            yield (
                f"{key}.async_rollouts=true draws one rollout ahead, and with "
                "trainer.ppo.dynamic_sampling.enabled=true nobody knows how many a step takes; set "
                "one of them to false"
            )
        if ppo.truncated_importance_sampling is None and not ppo.correction.is_on:
            yield (
                f"{key}.async_rollouts=true draws with weights one update old, which "
                "model.ppo.truncated_importance_sampling=null and an empty model.ppo.correction "
                "leave uncorrected; set model.ppo.correction.weights=token (with "
                "ratio_level=sequence: sequence), or model.ppo.correction.old_logprobs=sampler "
                "(docs/corrections.md)"
            )
