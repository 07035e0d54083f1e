"""Base class of rollout engines, which sample rollouts in place of the policy.

A subclass of `EngineConfig` defines an engine: its fields are the engine's keys, and `start` starts
the engine. `aligner.catalog.ENGINES` lists the engines of the library, whose names are sections of
`generation`. The key `generation.backend` selects an engine or a user-defined class.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from aligner.architecture import GPTArchitecture


class EngineResources(NamedTuple):
    """Devices and memory of rollout engines, for their placement and for `aligner plan`."""

    title: str  # of the engine
    engines: int  # each samples its share of every rollout
    devices_of_each: int
    shares_devices: bool  # with the policy's workers (otherwise on separate devices)
    refit_buffer_mb: float  # size of the groups in which weights are transferred
    kv_cache_mb: int | None  # per device (None: ``memory_share`` less the weights)
    memory_share: float  # share of a device, weights included
    sleeps: bool  # whether memory is freed between rollouts

    @property
    def workers(self) -> int:
        """Total number of processes: engines x devices per engine."""
        return self.engines * self.devices_of_each


class EngineStart(NamedTuple):
    """Arguments of `EngineConfig.start`. Some types are comments, to avoid circular imports."""

    cluster: Any  # aligner.distributed.interfaces.Cluster, for the engine's workers
    config: Any  # aligner.config.SamplingRunConfig
    tokenizer: Any  # aligner.data.tokenizers.tokenizer.Tokenizer
    architecture: GPTArchitecture
    policy: Any  # aligner.models.policy.lm_policy.Policy, which provides the weights
    max_sequence_length: int  # tokens of the longest prompt and response together


@dataclass(frozen=True)
class EngineConfig:
    """Base class for the settings of a rollout engine. Its methods check and start the engine."""

    title: ClassVar[str] = "the engine"  # name in messages
    draws_ahead: ClassVar[bool] = False  # whether its handle is a `BackgroundGeneration`

    def start(self, arguments: EngineStart) -> Any:
        """Start the engine and return its `aligner.models.interfaces.GenerationInterface`."""
        raise NotImplementedError

    def resources(self, *, has_gpu: bool, ahead: bool) -> EngineResources | None:
        """Return devices and memory of the engines, or None if the policy's processes generate.

        Args:
            has_gpu: whether the workers use GPUs.
            ahead: whether the next rollout is sampled while the policy trains.
        """
        del has_gpu, ahead
        return None

    def check_model(self, architecture: GPTArchitecture) -> None:
        """Raise `ConfigError` if the engine cannot load the model. Called before models exist."""

    def engine_problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for each invalid setting. ``key``: dotted key of the settings."""
        yield from ()

    def recording_problems(self, record: str, key: str, run: Any) -> Iterator[str]:
        """Yield error messages if the engine cannot record the tokens that top-k and top-p keep.

        ``record``: key and value at the start of a message. ``key``: key of the algorithm's
        section.
        """
        yield f"{record}: {self.title} does not record filtered tokens. Set it to 0"
