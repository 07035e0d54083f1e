"""Estimate of a run on its devices: memory of the fullest card in every phase, time of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.algorithms.run.startup import count_parameters
from aligner.architecture import GPTArchitecture
from aligner.config import BaseRunConfig
from aligner.parallel.groups import describe_layout
from aligner_plan.amounts import Amounts, Kinds, Measured, Time, time_of, total
from aligner_plan.devices import DeviceRates
from aligner_plan.dry.record import Kind
from aligner_plan.measure import MeasuredRole
from aligner_plan.measurements import Measurements
from aligner_plan.options import PlanConfig, with_length
from aligner_plan.rehearsal import planned_run
from aligner_plan.roles import Phase, PlannedRole, PlannedRun
from aligner_plan.work import LowerBounds, bubble_of, lower_bounds, work_of

RolePhase = tuple[str, str]  # names of a role and of one of its phases


@dataclass(frozen=True)
class PlannedPhase:
    """One phase of one role, on the rank of the role whose card is fullest."""

    peak: Kinds  # bytes of the role by kind
    peak_at: str
    other_roles: float  # bytes of other roles on the card meanwhile
    amounts: Amounts
    seconds: float
    time: Time
    tokens: float  # of all ranks: sampled, or passed through the model
    model_flops: float  # of all ranks, without recomputation: 2 or 6 per parameter and token
    processes: int

    @property
    def card_bytes(self) -> float:
        """All bytes on the card."""
        return total(self.peak) + self.other_roles


@dataclass(frozen=True)
class EstimatedRole:
    """A role in every phase."""

    role: PlannedRole
    parameters: int
    static: Kinds  # of the fullest rank, between two steps
    phases: dict[str, PlannedPhase]


@dataclass(frozen=True)
class Estimate:
    """Requirements of a run on devices of one kind."""

    config: BaseRunConfig
    device: DeviceRates
    margin: float
    usable_bytes: float  # of a card, without the margin
    cards: int
    roles: dict[str, EstimatedRole]
    step: tuple[RolePhase, ...]

    @property
    def fullest(self) -> RolePhase:
        """Role and phase with the fullest card."""
        return max(self.step, key=lambda item: self.phase(*item).card_bytes)

    @property
    def peak_bytes(self) -> float:
        """Largest use of a card."""
        return self.phase(*self.fullest).card_bytes

    @property
    def fits(self) -> bool:
        """True if every phase fits."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def _timed(self) -> list[RolePhase]:
        """Phases that are part of every step. A run state is saved once in many steps."""
        return [item for item in self.step if item[1] != "save"]

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of the algorithm."""
        return sum(self.phase(*item).seconds for item in self._timed)

    @property
    def slowest(self) -> RolePhase:
        """Role and phase with the largest share of a step."""
        return max(self._timed, key=lambda item: self.phase(*item).seconds)

    @property
    def tokens(self) -> float:
        """Tokens that a step's updates of the last trained role read."""
        trained = [self.phase(*item).tokens for item in self.step if item[1] == "train"]
        return trained[-1] if trained else 0.0

    def phase(self, role: str, phase: str) -> PlannedPhase:
        """Return one cell of the table."""
        return self.roles[role].phases[phase]

    def mfu(self, phase: PlannedPhase) -> float | None:
        """Return the model's arithmetic as a share of the devices' bf16 peak. None without any.

        Chowdhery et al. 2022 (PaLM), without attention. Recomputation does not count.
        """
        if not phase.model_flops or not phase.seconds:
            return None
        return phase.model_flops / phase.seconds / phase.processes / self.device.low_precision

    def as_dict(self) -> dict[str, Any]:
        """Return the content that ``plan.json=true`` prints."""
        return {
            "device": self.device.name,
            "devices": self.cards,
            "layout": {
                name: describe_layout(estimated.role.parallel, estimated.role.world)
                for name, estimated in self.roles.items()
            },
            "card_bytes": self.device.memory_bytes,
            "margin": self.margin,
            "fits": self.fits,
            "peak_bytes": round(self.peak_bytes),
            "fullest": list(self.fullest),
            "roles": {
                name: {
                    "parameters": estimated.parameters,
                    "static_bytes": round(total(estimated.static)),
                    "static": _by_kind(estimated.static),
                    "phases": {k: self._phase_dict(phase) for k, phase in estimated.phases.items()},
                }
                for name, estimated in self.roles.items()
            },
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens / self.step_seconds if self.step_seconds else 0.0,
            "slowest": list(self.slowest),
            "bound": self.phase(*self.slowest).time.bound,
        }

    def _phase_dict(self, phase: PlannedPhase) -> dict[str, Any]:
        within, across = phase.amounts.wire_bytes(self.device)
        return {
            "peak_bytes": round(total(phase.peak)),
            "peak": _by_kind(phase.peak),
            "peak_at": phase.peak_at,
            "beside_bytes": round(phase.other_roles),
            "fits": phase.card_bytes <= self.usable_bytes,
            "flops": sum(phase.amounts.flops.values()),
            "flops_by_dtype": phase.amounts.flops,
            "nvlink_bytes": within,
            "network_bytes": across,
            "host_bytes": phase.amounts.counters.get("copied_bytes", 0.0),
            "launches": phase.amounts.launches,
            "host_reads": phase.amounts.counters.get("host_reads", 0.0),
            "seconds": phase.seconds,
            "tokens": phase.tokens,
            "tokens_per_second": phase.tokens / phase.seconds if phase.seconds else 0.0,
            "mfu": self.mfu(phase),
            "bound": phase.time.bound,
        }


class Estimator:
    """Estimates of variants of one run. A role that did not change is not measured again."""

    def __init__(
        self,
        plan: PlanConfig,
        device: DeviceRates,
        architectures: Mapping[str, GPTArchitecture],
        measurements: Measurements | None = None,
    ) -> None:
        """``measurements``: earlier results and the measuring processes. None: this process."""
        self.plan, self.device = plan, device
        self._architectures = dict(architectures)
        self.measurements = measurements or Measurements()

    @property
    def usable_bytes(self) -> float:
        """Memory of a card, without the part that is reserved for uncounted use."""
        return self.device.memory_bytes * (1 - self.plan.margin)

    def architecture(self, config: BaseRunConfig) -> GPTArchitecture:
        """Return the architecture of the trained model."""
        return self._architectures[config.model.restore_from_path]

    def longest(self, config: BaseRunConfig) -> int:
        """Return the tokens of the longest sequence. Raises the errors of `with_length`."""
        positions = self.architecture(config).max_position_embeddings
        return sum(with_length(config, self.plan, positions))

    def lower_bounds(self, config: BaseRunConfig) -> LowerBounds:
        """Compute lower bounds of the requirements. Raises the errors of `planned_run`."""
        return lower_bounds(planned_run(config, self.plan, self._architectures), self.device)

    def estimate(self, config: BaseRunConfig) -> Estimate:
        """Estimate the requirements of a configuration. Raises the errors of `planned_run`."""
        return self.estimate_run(planned_run(config, self.plan, self._architectures))

    def estimate_run(self, run: PlannedRun) -> Estimate:
        """Estimate the requirements of the roles of a run."""
        ranks = self._measured_ranks(run.roles)
        roles = {
            name: EstimatedRole(
                role,
                count_parameters(role.architecture),
                max((_idle_memory(role, rank) for rank in ranks[name].values()), key=total),
                {phase.name: self._phase(run, role, phase, ranks) for phase in role.phases},
            )
            for name, role in run.roles.items()
        }
        worlds: dict[str, int] = {}  # by the name of the cards
        for role in run.roles.values():
            worlds[role.cards] = max(role.world, worlds.get(role.cards, 0))
        cards = sum(worlds.values())
        margin = self.plan.margin
        return Estimate(run.config, self.device, margin, self.usable_bytes, cards, roles, run.step)

    def _measured_ranks(
        self, roles: Mapping[str, PlannedRole]
    ) -> dict[str, dict[int, MeasuredRole]]:
        """Measure roles on their first and last pipeline stages. Inner stages need less memory."""
        stages = [
            (role, stage)
            for role in roles.values()
            for stage in sorted({0, role.parallel.pipeline - 1})
        ]
        ranks: dict[str, dict[int, MeasuredRole]] = {name: {} for name in roles}
        for (role, stage), measured in zip(stages, self.measurements.of(stages), strict=True):
            ranks[role.name][stage] = self._with_engine_memory(role, measured)
        return ranks

    def _with_engine_memory(self, role: PlannedRole, measured: MeasuredRole) -> MeasuredRole:
        """Replace the memory of an engine by its configured share. A sleeping engine frees it."""
        engine = role.engine
        if engine is None:
            return measured
        weights = measured.static.get(Kind.WEIGHTS, 0.0)
        if engine.kv_cache_mb is not None:
            cache = float(engine.kv_cache_mb << 20)
        else:
            cache = max(0.0, engine.memory_share * self.device.memory_bytes - weights)
        reserved: Kinds = {Kind.WEIGHTS: weights, Kind.KV_CACHE: cache}
        remaining: Kinds = {} if engine.sleeps else reserved
        phases = {
            name: Measured(phase.amounts, {engine.title: reserved}, remaining)
            for name, phase in measured.phases.items()
        }
        return MeasuredRole(measured.parameters, remaining, phases)

    def _phase(
        self,
        run: PlannedRun,
        role: PlannedRole,
        phase: Phase,
        ranks: Mapping[str, Mapping[int, MeasuredRole]],
    ) -> PlannedPhase:
        """Combine the ranks of a phase: the fullest rank's memory, the slowest rank's time."""
        measured = [
            rank.phases[phase.name]
            for rank in ranks[role.name].values()
            if phase.name in rank.phases
        ]
        fullest = max(measured, key=lambda rank: total(rank.peaks[rank.peak_at]))
        slowest = max(measured, key=lambda rank: time_of(rank.amounts, self.device).total)
        time = time_of(slowest.amounts, self.device)
        other_roles = sum(
            _idle_bytes(run, idle, (role.name, phase.name), ranks[idle.name])
            for idle in run.roles.values()
            if idle.name != role.name and idle.cards == role.cards
        )
        tokens, flops = work_of(role, phase)
        return PlannedPhase(
            fullest.peaks[fullest.peak_at],
            fullest.peak_at,
            other_roles,
            slowest.amounts,
            time.total * bubble_of(role, phase),
            time,
            tokens,
            flops,
            role.world,
        )


def _idle_memory(role: PlannedRole, measured: MeasuredRole) -> Kinds:
    """Return the memory of a rank between two steps, which its last phase determines."""
    called = [phase.name for phase in role.phases if phase.method]
    return measured.phases[called[-1]].remaining if called else measured.static


def _idle_bytes(
    run: PlannedRun, role: PlannedRole, current: RolePhase, ranks: Mapping[int, MeasuredRole]
) -> float:
    """Return the bytes of an idle role on its fullest rank, as left by its last phase."""
    index = run.step.index(current)
    earlier = [*run.step[index + 1 :], *run.step[:index]]  # of the previous step, then of this one
    phases = [phase for name, phase in earlier if name == role.name and phase != "save"]
    sizes = (
        total(rank.phases[phase].remaining)
        for rank in ranks.values()
        for phase in phases[-1:]
        if phase in rank.phases
    )
    return max(sizes, default=max(total(rank.static) for rank in ranks.values()))


def _by_kind(kinds: Kinds) -> dict[str, int]:
    return {str(kind): round(size) for kind, size in kinds.items() if round(size)}
