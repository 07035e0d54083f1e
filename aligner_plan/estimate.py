"""A run on its devices: memory of the fullest card in every phase, time of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.algorithms.run.startup import count_parameters
from aligner.architecture import GPTArchitecture
from aligner.config import BaseRunConfig
from aligner.config.commands.plan import PlanConfig, with_length
from aligner.parallel.groups import describe_layout
from aligner_plan.amounts import Amounts, Kinds, Measured, Time, time_of, total
from aligner_plan.devices import DeviceRates
from aligner_plan.dry.record import Kind
from aligner_plan.measure import MeasuredRole
from aligner_plan.measurements import Measurements
from aligner_plan.rehearsal import planned_run
from aligner_plan.roles import Phase, PlannedRole, PlannedRun
from aligner_plan.work import Least, bubble_of, least_of, work_of


@dataclass(frozen=True)
class PlannedPhase:
    """One phase of one role, on the rank of the role whose card is fullest.

    ``peak``: the role's own bytes by kind; ``beside``: of other roles on that card meanwhile.
    """

    peak: Kinds
    peak_at: str
    beside: float
    amounts: Amounts
    seconds: float
    time: Time
    tokens: float  # of all ranks; sampled ones, or those that pass through the model
    model_flops: float  # of all ranks, without recomputation: 2 or 6 a parameter and token
    processes: int

    @property
    def card_bytes(self) -> float:
        """Everything on the card."""
        return total(self.peak) + self.beside


@dataclass(frozen=True)
class EstimatedRole:
    """A role in every phase."""

    role: PlannedRole
    parameters: int
    static: Kinds  # of the fullest rank, between two steps
    phases: dict[str, PlannedPhase]


@dataclass(frozen=True)
class Estimate:
    """A run on a number of one kind of devices."""

    config: BaseRunConfig
    device: DeviceRates
    margin: float
    cards: int
    roles: dict[str, EstimatedRole]
    step: tuple[tuple[str, str], ...]

    @property
    def usable_bytes(self) -> float:
        """Memory of a card, without the part that is reserved for uncounted use."""
        return self.device.memory_bytes * (1 - self.margin)

    @property
    def fullest(self) -> tuple[str, str]:
        """Role and phase in which a card is fullest."""
        return max(self.step, key=lambda each: self.phase(*each).card_bytes)

    @property
    def peak_bytes(self) -> float:
        """Largest use of a card."""
        return self.phase(*self.fullest).card_bytes

    @property
    def fits(self) -> bool:
        """True if no phase needs more."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def step_seconds(self) -> float:
        """One step of the algorithm; run states are saved once in many."""
        return sum(self.phase(*each).seconds for each in self.step if each[1] != "save")

    @property
    def slowest(self) -> tuple[str, str]:
        """Role and phase that take most of a step."""
        return max(
            (each for each in self.step if each[1] != "save"),
            key=lambda each: self.phase(*each).seconds,
        )

    @property
    def tokens(self) -> float:
        """Tokens that a step's updates of the first trained role read."""
        trained = [self.phase(*each).tokens for each in self.step if each[1] == "train"]
        return trained[-1] if trained else 0.0

    def phase(self, role: str, phase: str) -> PlannedPhase:
        """One cell of the table."""
        return self.roles[role].phases[phase]

    def mfu(self, phase: PlannedPhase) -> float | None:
        """Share of the devices' peak in bf16 that the model's own arithmetic is; None: it has none.

        Chowdhery et al. 2022 (PaLM), attention left out: recomputation does not count.
        """
        if not phase.model_flops or not phase.seconds:
            return None
        return phase.model_flops / phase.seconds / phase.processes / self.device.low_precision

    def as_dict(self) -> dict[str, Any]:
        """Content that ``plan.json=true`` prints."""
        role, phase = self.slowest
        return {
            "device": self.device.name,
            "devices": self.cards,
            "layout": {
                name: describe_layout(each.role.parallel, each.role.world)
                for name, each in self.roles.items()
            },
            "card_bytes": self.device.memory_bytes,
            "margin": self.margin,
            "fits": self.fits,
            "peak_bytes": round(self.peak_bytes),
            "fullest": list(self.fullest),
            "roles": {name: self._role(each) for name, each in self.roles.items()},
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens / self.step_seconds if self.step_seconds else 0.0,
            "slowest": [role, phase],
            "bound": self.phase(role, phase).time.bound,
        }

    def _role(self, each: EstimatedRole) -> dict[str, Any]:
        return {
            "parameters": each.parameters,
            "static_bytes": round(total(each.static)),
            "static": _by_kind(each.static),
            "phases": {name: self._phase(phase) for name, phase in each.phases.items()},
        }

    def _phase(self, phase: PlannedPhase) -> dict[str, Any]:
        within, across = phase.amounts.wire_bytes(self.device)
        return {
            "peak_bytes": round(total(phase.peak)),
            "peak": _by_kind(phase.peak),
            "peak_at": phase.peak_at,
            "beside_bytes": round(phase.beside),
            "fits": phase.card_bytes <= self.usable_bytes,
            "flops": sum(phase.amounts.flops.values()),
            "flops_by_dtype": phase.amounts.flops,
            "nvlink_bytes": within,
            "network_bytes": across,
            "host_bytes": phase.amounts.others.get("copied_bytes", 0.0),
            "launches": phase.amounts.launches,
            "host_reads": phase.amounts.others.get("host_reads", 0.0),
            "seconds": phase.seconds,
            "tokens": phase.tokens,
            "tokens_per_second": phase.tokens / phase.seconds if phase.seconds else 0.0,
            "mfu": self.mfu(phase),
            "bound": phase.time.bound,
        }


class Estimator:
    """Estimates of variants of one run; a role that did not change is not measured again."""

    def __init__(
        self,
        plan: PlanConfig,
        device: DeviceRates,
        architectures: Mapping[str, GPTArchitecture],
        measurements: Measurements | None = None,
    ) -> None:
        """``measurements``: who measures, and what was; default a measurer in this process."""
        self.plan, self.device = plan, device
        self._architectures = dict(architectures)
        self.measurements = measurements or Measurements()

    @property
    def usable_bytes(self) -> float:
        """Memory of a card, without the part that is reserved for uncounted use."""
        return self.device.memory_bytes * (1 - self.plan.margin)

    def architecture(self, config: BaseRunConfig) -> GPTArchitecture:
        """Architecture of the trained model."""
        return self._architectures[config.model.restore_from_path]

    def longest(self, config: BaseRunConfig) -> int:
        """Tokens of the longest sequence; raises the errors of `with_length`."""
        positions = self.architecture(config).max_position_embeddings
        return sum(with_length(config, self.plan, positions))

    def least(self, config: BaseRunConfig) -> Least:
        """Least requirements of the run, by arithmetic; raises the errors of `planned_run`."""
        return least_of(planned_run(config, self.plan, self._architectures), self.device)

    def estimate(self, config: BaseRunConfig) -> Estimate:
        """Requirements of a configuration; raises the errors of `planned_run`."""
        return self.estimate_run(planned_run(config, self.plan, self._architectures))

    def estimate_run(self, run: PlannedRun) -> Estimate:
        """Requirements of the roles of a run."""
        ranks = self._ranks(run.roles)
        roles = {
            name: EstimatedRole(
                role,
                count_parameters(role.architecture),
                max((_waiting(role, each) for each in ranks[name].values()), key=total),
                {phase.name: self._phase(run, role, phase, ranks) for phase in role.phases},
            )
            for name, role in run.roles.items()
        }
        margin = self.plan.margin
        return Estimate(run.config, self.device, margin, cards_of(run), roles, run.step)

    def _ranks(self, roles: Mapping[str, PlannedRole]) -> dict[str, dict[int, MeasuredRole]]:
        """Roles on their first and last pipeline stages; those between hold less."""
        places = [
            (role, stage)
            for role in roles.values()
            for stage in sorted({0, role.parallel.pipeline - 1})
        ]
        ranks: dict[str, dict[int, MeasuredRole]] = {name: {} for name in roles}
        for (role, stage), found in zip(places, self.measurements.of(places), strict=True):
            ranks[role.name][stage] = self._with_reserve(role, found)
        return ranks

    def _with_reserve(self, role: PlannedRole, found: MeasuredRole) -> MeasuredRole:
        """Memory of an engine: its share while it samples, and after that unless it sleeps."""
        given = role.engine
        if given is None:
            return found
        weights = found.static.get(Kind.WEIGHTS, 0.0)
        if given.kv_cache_mb is not None:
            cache = float(given.kv_cache_mb << 20)
        else:
            cache = max(0.0, given.memory_share * self.device.memory_bytes - weights)
        held: Kinds = {Kind.WEIGHTS: weights, Kind.KV_CACHE: cache}
        rest: Kinds = {} if given.sleeps else held
        phases = {
            name: Measured(each.amounts, {given.title: held}, rest)
            for name, each in found.phases.items()
        }
        return MeasuredRole(found.parameters, rest, phases)

    def _phase(
        self,
        run: PlannedRun,
        role: PlannedRole,
        phase: Phase,
        ranks: Mapping[str, Mapping[int, MeasuredRole]],
    ) -> PlannedPhase:
        there = [
            each.phases[phase.name]
            for each in ranks[role.name].values()
            if phase.name in each.phases
        ]
        fullest = max(there, key=lambda each: total(each.peaks[each.peak_at]))
        slowest = max(there, key=lambda each: time_of(each.amounts, self.device).total)
        time = time_of(slowest.amounts, self.device)
        beside = sum(
            _resting(run, other, (role.name, phase.name), ranks[other.name])
            for other in run.roles.values()
            if other.name != role.name and other.cards == role.cards
        )
        tokens, flops = work_of(role, phase)
        return PlannedPhase(
            fullest.peaks[fullest.peak_at],
            fullest.peak_at,
            beside,
            slowest.amounts,
            time.total * bubble_of(role, phase),
            time,
            tokens,
            flops,
            role.world,
        )


def cards_of(run: PlannedRun) -> int:
    """Devices that the roles stand on."""
    places: dict[str, int] = {}
    for role in run.roles.values():
        places[role.cards] = max(role.world, places.get(role.cards, 0))
    return sum(places.values())


def _waiting(role: PlannedRole, found: MeasuredRole) -> Kinds:
    """Memory held on a rank's card between two steps: as the role's last phase leaves it."""
    done = [phase.name for phase in role.phases if phase.method]
    return found.phases[done[-1]].rest if done else found.static


def _resting(
    run: PlannedRun,
    other: PlannedRole,
    now: tuple[str, str],
    ranks: Mapping[int, MeasuredRole],
) -> float:
    """Bytes of a role that waits, on its fullest rank: as its last phase before ``now`` left it."""
    place = run.step.index(now)
    around = [*run.step[place + 1 :], *run.step[:place]]  # the step before, and this one
    mine = [phase for name, phase in around if name == other.name and phase != "save"]
    rests = (
        total(each.phases[phase].rest)
        for each in ranks.values()
        for phase in mine[-1:]
        if phase in each.phases
    )
    return max(rests, default=max(total(each.static) for each in ranks.values()))


def _by_kind(kinds: Kinds) -> dict[str, int]:
    return {str(kind): round(size) for kind, size in kinds.items() if round(size)}
