"""Work of a model of a run in one step of its algorithm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.architecture import GPTArchitecture
from aligner.config import (
    BaseRunConfig,
    CriticConfig,
    EngineResources,
    ParallelConfig,
    SamplingParams,
    TrainedModelConfig,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.workers import LocalCluster
from aligner.models.handle import RoleHandle
from aligner.types import LossFunction

Shape = tuple[str | int, ...]


@dataclass(frozen=True)
class Start:
    """Start of a role: its handle with ``model``'s settings and ``options``.

    Two with the same representation start alike.
    """

    handle: Callable[..., RoleHandle]
    model: TrainedModelConfig | CriticConfig
    options: Mapping[str, Any]

    def __call__(self, cluster: LocalCluster, tokenizer: Tokenizer) -> RoleHandle:
        """The role, on this process."""
        return self.handle(cluster, self.model, tokenizer, **self.options)


@dataclass(frozen=True)
class Rows:
    """Sequences of a phase: all of one length, the longest possible.

    ``count``: of a data-parallel rank, in each of ``times`` parts of a step. ``trailing``: shape
    behind ``[B, S]`` or ``[B]`` of columns that are not ``[B, S]`` floats; see `measure.columns`.
    """

    count: int
    length: int
    columns: tuple[str, ...]
    times: int = 1
    together: int = 1  # adjacent rows that one micro-batch must hold
    trailing: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class Train:
    """Updates."""

    name: str
    rows: Rows
    loss: LossFunction
    micro_batch_size: int


@dataclass(frozen=True)
class Score:
    """Forward passes: the worker's method ``call``, between ``enter`` and `finish_inference`."""

    name: str
    rows: Rows
    call: str
    micro_batch_size: int
    enter: str = "prepare_for_inference"
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Generate:
    """A rollout of ``rows`` responses on a rank, ``slots`` at a time."""

    name: str
    rows: int
    slots: int
    prompt: int
    response: int
    per_prompt: int
    sampling: SamplingParams


@dataclass(frozen=True)
class HandOver:
    """Work beside the step: ``refit`` of engines, ``save`` of the run state."""

    name: str
    buffer_bytes: int = 0  # what one group of tensors takes on its way


Phase = Train | Score | Generate | HandOver


@dataclass(frozen=True)
class PlannedRole:
    """A model of the run: how it starts, and its phases in the order of a step."""

    name: str
    architecture: GPTArchitecture
    model: TrainedModelConfig  # its layout and token budgets
    world: int  # processes
    cards: str  # roles of one name share cards
    start: Start
    phases: tuple[Phase, ...]
    attributes: tuple[str, ...] = ()
    engine: EngineResources | None = None  # of a role that stands for rollout engines
    learns: bool = False  # has an optimizer; always where updates are among the phases

    def __post_init__(self) -> None:
        updates = any(isinstance(phase, Train) for phase in self.phases)
        object.__setattr__(self, "learns", self.learns or updates)

    @property
    def parallel(self) -> ParallelConfig:
        """Parallel layout of the role."""
        return self.model.parallel


@dataclass(frozen=True)
class PlannedRun:
    """The roles of a run, and the order of a step: (role, phase)."""

    config: BaseRunConfig
    roles: dict[str, PlannedRole]
    step: tuple[tuple[str, str], ...]


def starting(
    handle: Callable[..., RoleHandle], model: TrainedModelConfig | CriticConfig, /, **options: Any
) -> Start:
    """`Start` with ``options`` as keywords."""
    return Start(handle, model, options)


def policy_scores(name: str, rows: Rows, call: str, size: int, **options: int) -> Score:
    """Log-probs or logits of a policy."""
    return Score(name, rows, call, size, "prepare_for_lp_inference", options=options)
