"""Sampling of responses by the policy's workers, or by engines with a copy of the weights."""

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


def _with_sections(cls: type) -> type:
    """Add a field to the dataclass ``cls`` for the settings of each built-in rollout engine."""

    def has_backend(name: str, run: Any) -> bool:
        return bool(run.generation.backend == name)

    for name, path in ENGINES.items():
        section = imported(path)
        selected = ReadIf(partial(has_backend, name), f"needs generation.backend={name}")
        cls.__annotations__[name] = Annotated[section, selected]
        setattr(cls, name, field(default_factory=section))
    return cls


@dataclass(frozen=True)
@_with_sections
class GenerationConfig:
    """Options of the engine that samples responses."""

    backend: Annotated[
        StrictStr, one_of(("megatron", *ENGINES), or_path="package.module:Class")
    ] = "megatron"
    """Engine that samples responses. `megatron`: the policy's workers. `vllm`: vLLM engines on Ray
    (docs/vllm.md). Or a user-defined engine, `package.module:Class` or `path/to/file.py:Class`
    (docs/howto.md#a-rollout-engine)."""

    kwargs: Annotated[
        Mapping[str, Any],
        ReadIf(lambda run: run.generation.is_user_defined, "needs a user-defined engine"),
    ] = field(default_factory=dict)
    """Settings of a user-defined engine: values of the fields of its class."""

    cuda_graphs: StrictBool = True
    """`megatron` on GPUs: launch each decoding step as one CUDA graph. Applies to dense models
    without tensor and pipeline parallelism. The sampled tokens are the same without CUDA graphs."""

    async_rollouts: StrictBool = False
    """Sample the rollout of the next step while the current step trains, with the old weights.
    Needs `vllm` and a correction (docs/corrections.md)."""

    in_flight: Literal["finish", "abandon"] = "finish"
    """Treatment of an asynchronous rollout at a validation or a save. `finish`: wait for the
    rollout and save it. `abandon`: sample it again with the new weights."""

    @property
    def is_user_defined(self) -> bool:
        """True if the engine is a user-defined class."""
        return self.backend not in ("megatron", *ENGINES)

    @property
    def engine_key(self) -> str:
        """Dotted key of the selected engine's settings."""
        return "generation.kwargs" if self.is_user_defined else f"generation.{self.backend}"

    @property
    def engine(self) -> EngineConfig | None:
        """Settings of the engine, None if the policy samples. Raises `ConfigError` if invalid."""
        if self.backend == "megatron":
            return None
        if not self.is_user_defined:
            return getattr(self, self.backend)
        kind = load_function(self.backend, key="generation.backend", kind="class")
        if not (isinstance(kind, type) and issubclass(kind, EngineConfig)):
            raise ConfigError(
                f"generation.backend={self.backend}: must be a subclass of "
                "aligner.config.EngineConfig (docs/howto.md#a-rollout-engine)"
            )
        return build(kind, self.kwargs, self.engine_key)

    def resources(self, *, has_gpu: bool) -> EngineResources | None:
        """Return devices and memory of the engines, or None if the policy's processes generate."""
        engine, ahead = self.engine, self.async_rollouts
        return None if engine is None else engine.resources(has_gpu=has_gpu, ahead=ahead)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for invalid options of the engine and of asynchronous rollouts."""
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
        # Engine.
        if engine is None or not engine.draws_ahead:
            engines = " or ".join(name for name in ENGINES if getattr(self, name).draws_ahead)
            sampler = "the policy's workers" if engine is None else engine.title
            yield (
                f"{key}.async_rollouts=true needs an engine that samples while the policy trains, "
                f"but {key}.backend={self.backend} samples with {sampler}. Set "
                f"{key}.backend={engines}"
            )

        # Algorithm.
        ppo = getattr(run.model, "ppo", None)
        if ppo is None:
            return
        if run.trainer.ppo.dynamic_sampling.enabled:
            yield (
                f"{key}.async_rollouts=true samples one rollout ahead, but a step needs an unknown "
                "number with trainer.ppo.dynamic_sampling.enabled=true. Set one of them to false"
            )
        # Correction of the older weights.
        if ppo.truncated_importance_sampling is None and not ppo.correction.is_on:
            yield (
                f"{key}.async_rollouts=true samples with the weights of the previous update and "
                "needs a correction, but model.ppo.truncated_importance_sampling=null and "
                "model.ppo.correction is empty. Set model.ppo.correction.weights=token (with "
                "ratio_level=sequence: sequence), or model.ppo.correction.old_logprobs=sampler "
                "(docs/corrections.md)"
            )
