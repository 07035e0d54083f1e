"""Base of the sections of rollout engines, which sample for a policy in its place.

An engine is one class: an `EngineConfig` whose fields are its keys, whose rules are checked with
the configuration, and which starts it. The engines of the library are the table
`aligner.catalog.ENGINES`, each with a section of its name in `generation`; a user's own is named by
its path in `generation.backend`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from aligner.architecture import GPTArchitecture


class EngineResources(NamedTuple):
    """Devices and memory that engines take, for their room and for `aligner plan`."""

    title: str  # of the engine
    engines: int  # each draws its share of every rollout
    devices_of_each: int
    shares_devices: bool  # with the policy's workers; else they have a room of their own
    refit_buffer_mb: float  # weights are handed over in groups of this size
    kv_cache_mb: int | None  # on a device; None: what the weights leave of ``memory_share``
    memory_share: float  # share of a device, weights included
    sleeps: bool  # memory is given back between rollouts

    @property
    def workers(self) -> int:
        """Processes of all engines."""
        return self.engines * self.devices_of_each

    @property
    def own_workers(self) -> int:
        """Processes in a room of their own."""
        return 0 if self.shares_devices else self.workers


class EngineStart(NamedTuple):
    """Arguments with which an engine starts. Classes of later packages are named in comments."""

    cluster: Any  # aligner.distributed.interfaces.Cluster, its room
    config: Any  # aligner.config.SamplingRunConfig
    tokenizer: Any  # aligner.data.tokenizers.tokenizer.Tokenizer
    architecture: GPTArchitecture
    policy: Any  # aligner.models.policy.lm_policy.Policy, whose weights it samples with
    max_sequence_length: int  # tokens of the longest prompt and response together


@dataclass(frozen=True)
class EngineConfig:
    """Settings of a rollout engine, its rules, and its start."""

    title: ClassVar[str] = "the engine"  # name in messages
    draws_ahead: ClassVar[bool] = False  # whether its handle is a `BackgroundGeneration`

    def start(self, given: EngineStart) -> Any:
        """Return the engine's handle, an `aligner.models.interfaces.GenerationInterface`.

        Its `prepare_for_generation` brings it the policy's weights.
        """
        raise NotImplementedError

    def resources(self, *, has_gpu: bool, ahead: bool) -> EngineResources | None:
        """Devices and memory of the engines. None means nothing beyond the policy's processes.

        Args:
            has_gpu: whether workers compute on GPUs.
            ahead: whether rollouts are drawn while the policy trains.
        """
        del has_gpu, ahead
        return None

    def engine_problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield a message for each rule that a run with this engine breaks.

        Args:
            key: dotted key of the engine's settings.
            run: the whole configuration.
        """
        yield from ()

    def recording_problems(self, record: str, key: str, run: Any) -> Iterator[str]:
        """Yield a message for each reason why the engine cannot record the tokens that it kept.

        Args:
            record: the setting that asks for it, with which a message begins.
            key: dotted key of the policy's section of the algorithm.
            run: the whole configuration.
        """
        yield f"{record}: {self.title} does not record which tokens it kept. Set it to 0"
