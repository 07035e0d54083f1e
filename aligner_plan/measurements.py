"""Measurements of roles, made once: in parts that variants of a run share, on all CPU cores.

A part is a role on one pipeline stage, with one number of layers, in its updates or in its other
phases. Those do not change with recomputation and with what forms micro-batches of updates, so
variants that differ only there share them.
"""

import ctypes
import os
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from aligner.config import (
    CriticConfig,
    DynamicBatchingConfig,
    SequencePackingConfig,
    TrainedModelConfig,
)
from aligner_plan.measure import MeasuredRole, depths_of, joined, measure_at
from aligner_plan.roles import Phase, PlannedRole

Budgets = TypeVar("Budgets", SequencePackingConfig, DynamicBatchingConfig)
_MOST_PROCESSES = 8  # each takes about 1 GB
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _Part:
    role: PlannedRole
    stage: int
    layers: int  # of each pipeline stage
    names: tuple[str, ...]  # of phases

    @property
    def key(self) -> str:
        """Parts with the same take the same."""
        return repr(replace(self, role=replace(self.role, name="", cards="", engine=None)))


class Measurements:
    """Parts that were measured, and the processes that measure more."""

    def __init__(self, processes: int | None = 1) -> None:
        """``processes``: 1 measures in this one; None takes one for every CPU core, up to 8.

        Other processes are forks of this one, in which torch must not have run a backward pass.
        """
        cores = len(os.sched_getaffinity(0))
        self._processes = min(_MOST_PROCESSES, cores) if processes is None else processes
        self._pool: Executor | None = None
        self._known: dict[str, MeasuredRole] = {}
        self.measured = 0  # parts

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def of(self, places: Iterable[tuple[PlannedRole, int]]) -> list[MeasuredRole]:
        """Each role on a rank of the pipeline stage beside it."""
        parts = [_parts_of(role, stage) for role, stage in places]
        missing = {
            part.key: part
            for groups in parts
            for group in groups
            for part in group
            if part.key not in self._known
        }
        # Those that take longest begin first.
        order = sorted(missing, key=lambda key: -missing[key].layers)
        measured = self._map([missing[key] for key in order])
        self._known |= dict(zip(order, measured, strict=True))
        self.measured += len(order)
        return [self._whole(groups) for groups in parts]

    def _map(self, parts: Sequence[_Part]) -> Sequence[MeasuredRole]:
        if self._processes == 1 or not parts:
            return [_measured(part) for part in parts]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                mp_context=get_context("fork"),
                initializer=_ready,
                initargs=(os.getpid(),),
            )
        return list(self._pool.map(_measured, parts))

    def _whole(self, groups: Sequence[Sequence[_Part]]) -> MeasuredRole:
        """All phases of a role, with all of its layers."""
        found = [
            joined(
                {part.layers: self._known[part.key] for part in group},
                group[0].role.architecture.num_layers // group[0].role.parallel.pipeline,
            )
            for group in groups
        ]
        phases = {name: phase for each in found for name, phase in each.phases.items()}
        return replace(found[0], phases=phases)


def _parts_of(role: PlannedRole, stage: int) -> list[list[_Part]]:
    """Parts by whether updates are among them; in each group one for every number of layers."""
    names = [phase.name for phase in role.phases]
    first = next((n for n, each in enumerate(role.phases) if each.is_update), len(names))
    before, after = tuple(names[:first]), tuple(names[first:])
    groups = []
    if before:
        groups.append((_without_updates(role, first) if after else role, before))
    if after:  # after phases that leave something, so they are there too
        groups.append((role, after))
    return [[_Part(each, stage, layers, own) for layers in depths_of(each)] for each, own in groups]


def _without_updates(role: PlannedRole, number: int) -> PlannedRole:
    """The first ``number`` phases, with one value of everything that only updates depend on."""
    options = dict(role.options)
    for name in options.keys() & {"config", "model"}:
        options[name] = _plain(options[name])
    phases = (_sized(role, phase) for phase in role.phases[:number])
    return replace(role, options=options, phases=tuple(phases))


def _sized(role: PlannedRole, phase: Phase) -> Phase:
    """The phase with the size of its micro-batches, which may follow from that of updates."""
    if phase.method == "generate" or role.batching(phase):
        return phase
    options = {**phase.options, "micro_batch_size": role.micro_batch_size(phase)}
    return replace(phase, options=options)


def _plain(section: Any) -> Any:
    if isinstance(section, CriticConfig):
        return replace(section, micro_batch_size=1)
    assert isinstance(section, TrainedModelConfig)
    return replace(
        section,
        micro_batch_size=1,
        activations_checkpoint_granularity=None,
        sequence_packing=_of_scores(section.sequence_packing),
        dynamic_batching=_of_scores(section.dynamic_batching),
    )


def _of_scores(budgets: Budgets) -> Budgets:
    tokens = budgets.logprob_mb_tokens or budgets.train_mb_tokens
    return replace(budgets, train_mb_tokens=tokens, logprob_mb_tokens=None)


def _measured(part: _Part) -> MeasuredRole:
    return measure_at(part.role, part.stage, part.layers, names=part.names)


def _ready(parent: int) -> None:
    """Set up a measuring process, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    torch.set_num_threads(1)
