"""Measurements of roles, made once: in parts that variants of a run share, on all CPU cores.

A part is a role on one pipeline stage, with one number of layers, either in its updates or in its
other phases. Recomputation and the micro-batches of updates do not affect the other phases, so
variants that differ only there share these parts.

    roles, stages ─► parts ─► parts not yet measured ─► processes ─► results by key ─► roles
"""

import ctypes
import os
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from aligner.config import (
    CriticConfig,
    DynamicBatchingConfig,
    SequencePackingConfig,
    TrainedModelConfig,
)
from aligner_plan.measure import MeasuredRole, depths_of, joined, measure_at, stage_layers
from aligner_plan.roles import Phase, PlannedRole

Budgets = TypeVar("Budgets", SequencePackingConfig, DynamicBatchingConfig)
_MOST_PROCESSES = 8  # each needs about 1 GB
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _Part:
    role: PlannedRole
    stage: int
    layers: int  # of each pipeline stage
    names: tuple[str, ...]  # of phases

    @property
    def key(self) -> str:
        """Key that parts with equal results share."""
        options = dict(self.role.options)
        if "model" in options:  # a critic does not read the sections of the policy's algorithm
            shared = fields(TrainedModelConfig)
            options["model"] = [getattr(options["model"], field.name) for field in shared]
        role = replace(self.role, name="", cards="", engine=None, options=options)
        return repr(replace(self, role=role))

    def measure(self) -> MeasuredRole:
        return measure_at(self.role, self.stage, self.layers, names=self.names)


class Measurements:
    """Results of the measured parts, and the processes that measure others."""

    def __init__(self, processes: int | None = 1) -> None:
        """``processes``: 1 measures in this process, None in one process per CPU core, up to 8.

        The processes are forks of this process, in which torch must not have run a backward pass.
        """
        cores = len(os.sched_getaffinity(0))
        self._processes = min(_MOST_PROCESSES, cores) if processes is None else processes
        self._pool: Executor | None = None
        self._results: dict[str, MeasuredRole] = {}
        self.measured = 0  # parts

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def of(self, stages: Iterable[tuple[PlannedRole, int]]) -> list[MeasuredRole]:
        """Measure each role on one rank of its pipeline stage. ``stages``: role and stage."""
        parts = [_parts_of(role, stage) for role, stage in stages]
        missing = {
            part.key: part
            for groups in parts
            for group in groups
            for part in group
            if part.key not in self._results
        }
        # Parts with many layers take longest and begin first.
        order = sorted(missing, key=lambda key: -missing[key].layers)
        measured = self._map([missing[key] for key in order])
        self._results |= dict(zip(order, measured, strict=True))
        self.measured += len(order)
        return [self._combined(groups) for groups in parts]

    def _map(self, parts: Sequence[_Part]) -> Sequence[MeasuredRole]:
        if self._processes == 1 or not parts:
            return [part.measure() for part in parts]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                mp_context=get_context("fork"),
                initializer=_set_up_process,
                initargs=(os.getpid(),),
            )
        return list(self._pool.map(_Part.measure, parts))

    def _combined(self, groups: Sequence[Sequence[_Part]]) -> MeasuredRole:
        """Combine the parts of a role to all phases with all layers."""
        roles = [
            joined(
                {part.layers: self._results[part.key] for part in group},
                stage_layers(group[0].role),
            )
            for group in groups
        ]
        phases = {name: phase for role in roles for name, phase in role.phases.items()}
        return replace(roles[0], phases=phases)


def _parts_of(role: PlannedRole, stage: int) -> list[list[_Part]]:
    """Return the parts before and from the first update. Each group has a part per depth."""
    names = tuple(phase.name for phase in role.phases)
    is_update = [phase.is_update for phase in role.phases]
    first = is_update.index(True) if True in is_update else len(names)
    groups = []
    if first > 0:
        scoring = _without_updates(role, first) if first < len(names) else role
        groups.append((scoring, names[:first]))
    if first < len(names):  # the role keeps the earlier phases, whose memory remains
        groups.append((role, names[first:]))
    return [
        [_Part(part_role, stage, layers, part_names) for layers in depths_of(part_role)]
        for part_role, part_names in groups
    ]


def _without_updates(role: PlannedRole, count: int) -> PlannedRole:
    """Return the first ``count`` phases, with fixed values of all options of updates only."""
    options = dict(role.options)
    for name in options.keys() & {"config", "model"}:
        options[name] = _normalised(options[name])
    phases = (_with_batch_size(role, phase) for phase in role.phases[:count])
    return replace(role, options=options, phases=tuple(phases))


def _with_batch_size(role: PlannedRole, phase: Phase) -> Phase:
    """Fix the size of the phase's micro-batches, which may depend on the size for updates."""
    if phase.method == "generate" or role.batching(phase):
        return phase
    options = {**phase.options, "micro_batch_size": role.micro_batch_size(phase)}
    return replace(phase, options=options)


def _normalised(section: Any) -> Any:
    if isinstance(section, CriticConfig):
        return replace(section, micro_batch_size=1)
    assert isinstance(section, TrainedModelConfig)
    return replace(
        section,
        micro_batch_size=1,
        activations_checkpoint_granularity=None,
        sequence_packing=_scoring_budget(section.sequence_packing),
        dynamic_batching=_scoring_budget(section.dynamic_batching),
    )


def _scoring_budget(budgets: Budgets) -> Budgets:
    tokens = budgets.logprob_mb_tokens or budgets.train_mb_tokens
    return replace(budgets, train_mb_tokens=tokens, logprob_mb_tokens=None)


def _set_up_process(parent: int) -> None:
    """Prepare a measuring process, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    torch.set_num_threads(1)
