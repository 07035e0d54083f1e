"""Sampling of the responses: with the training weights, or by engines that receive a copy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import StrictBool, StrictStr

from aligner.catalog import ENGINES, imported
from aligner.config.combinations import ReadIf
from aligner.config.engine import EngineConfig, EngineResources
from aligner.config.fields import one_of
from aligner.config.parse import build
from aligner.errors import ConfigError
from aligner.importing import load_function


def _has_backend(name: str, run: Any) -> bool:
    return bool(run.generation.backend == name)


def _with_sections(cls: type) -> type:
    """Add a field for the section of each rollout engine of the library."""
    for name, path in ENGINES.items():
        section = imported(path)
        selected = ReadIf(partial(_has_backend, name), f"needs generation.backend={name}")
        cls.__annotations__[name] = Annotated[section, selected]
        setattr(cls, name, field(default_factory=section))
    return cls


@dataclass(frozen=True)
@_with_sections
class GenerationConfig:
    """Sampling of responses."""

    backend: Annotated[
        StrictStr, one_of(("megatron", *ENGINES), or_path="package.module:Class")
    ] = "megatron"
    """Sampling by the policy's own workers, or by engines with a copy.

    `megatron`: the former. `vllm`: vLLM engines, brought up to date before every rollout; needs
    `cluster.engine=ray` (docs/vllm.md). Or an engine of your own, `package.module:Class` or
    `path/to/file.py:Class` (docs/howto.md#a-rollout-engine).
    """

    kwargs: Annotated[
        Mapping[str, Any],
        ReadIf(lambda run: run.generation.is_own, "is of an engine of your own"),
    ] = field(default_factory=dict)
    """Settings of an engine of your own: values of the fields of its class."""

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

    @property
    def is_own(self) -> bool:
        """True if the engine is a class of the user's own."""
        return self.backend not in ("megatron", *ENGINES)

    @property
    def engine_key(self) -> str:
        """Dotted key of the engine's settings."""
        return "generation.kwargs" if self.is_own else f"generation.{self.backend}"

    @property
    def engine(self) -> EngineConfig | None:
        """Settings of the engine. None means the policy's own workers sample.

        Raises:
            ConfigError: ``backend`` names no class of an engine, or ``kwargs`` are not of its keys.
        """
        if self.backend == "megatron":
            return None
        if not self.is_own:
            return getattr(self, self.backend)
        kind = load_function(self.backend, key="generation.backend", kind="class")
        if not (isinstance(kind, type) and issubclass(kind, EngineConfig)):
            raise ConfigError(
                f"generation.backend={self.backend}: must be a subclass of "
                "aligner.config.EngineConfig (docs/howto.md#a-rollout-engine)"
            )
        return build(kind, self.kwargs, self.engine_key)

    def resources(self, *, has_gpu: bool) -> EngineResources | None:
        """Devices and memory of the engines. None means nothing beyond the policy's processes."""
        engine = self.engine
        if engine is None:
            return None
        return engine.resources(has_gpu=has_gpu, ahead=self.async_rollouts)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse engines that cannot be started, and old weights without a correction."""
        try:
            engine = self.engine
        except ConfigError as error:
            yield str(error)
            return
        if self.async_rollouts:
            yield from self._async_problems(key, run, engine)
        if engine is not None:
            yield from engine.engine_problems(self.engine_key, run)

    def _async_problems(self, key: str, run: Any, engine: EngineConfig | None) -> Iterator[str]:
        if engine is None or not engine.draws_ahead:
            engines = " or ".join(name for name in ENGINES if getattr(self, name).draws_ahead)
            sampler = "the policy's own workers" if engine is None else engine.title
            yield (
                f"{key}.async_rollouts=true needs an engine that draws while the policy trains, "
                f"and {key}.backend={self.backend} draws with {sampler}. Set "
                f"{key}.backend={engines}"
            )
        ppo = getattr(run.model, "ppo", None)
        if ppo is None:
            return
        if run.trainer.ppo.dynamic_sampling.enabled:
            yield (
                f"{key}.async_rollouts=true draws one rollout ahead, and with "
                "trainer.ppo.dynamic_sampling.enabled=true nobody knows how many a step takes. Set "
                "one of them to false"
            )
        if ppo.truncated_importance_sampling is None and not ppo.correction.is_on:
            yield (
                f"{key}.async_rollouts=true draws with weights one update old, which "
                "model.ppo.truncated_importance_sampling=null and an empty model.ppo.correction "
                "leave uncorrected. Set model.ppo.correction.weights=token (with "
                "ratio_level=sequence: sequence), or model.ppo.correction.old_logprobs=sampler "
                "(docs/corrections.md)"
            )
