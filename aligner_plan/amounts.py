"""Amounts of phases, as numbers that can be added and scaled, and the time they take a device.

Runs on the dry device are short: of a few layers, of one and two micro-batches. Everything counted
is linear in both, so two runs give any number of them.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from aligner_plan.devices import (
    COLLECTIVE_SECONDS,
    KERNEL_SECONDS,
    LAUNCH_SECONDS,
    MEMORY_REACHED,
    READ_SECONDS,
    WIRE_REACHED,
    DeviceRates,
)
from aligner_plan.dry.record import Collective, Kernel, Kind, Record

Kinds = dict[Kind, float]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Amounts:
    """Counts of a phase on one rank."""

    kernels: dict[Kernel, float] = field(default_factory=dict)
    calls: dict[Collective, float] = field(default_factory=dict)
    wires: dict[Collective, float] = field(default_factory=dict)  # bytes of the larger operand
    others: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record) -> "Amounts":
        """Amounts that a record has counted."""
        return cls(
            {kernel: float(count) for kernel, count in record.kernels.items()},
            {key: float(calls) for key, (calls, _) in record.collectives.items()},
            {key: float(size) for key, (_, size) in record.collectives.items()},
            {
                "launches": float(record.launches),
                "host_reads": float(record.host_reads),
                "copied_bytes": float(record.copied_bytes),
            },
        )

    def plus(self, other: "Amounts", times: float = 1.0) -> "Amounts":
        """``self + times * other``."""
        return Amounts(
            _sum(self.kernels, other.kernels, times),
            _sum(self.calls, other.calls, times),
            _sum(self.wires, other.wires, times),
            _sum(self.others, other.others, times),
        )

    @property
    def launches(self) -> float:
        """Kernels that the host starts; a CUDA graph of many is one."""
        return self.others.get("launches", 0.0)

    @property
    def flops(self) -> dict[str, float]:
        """Floating-point operations by dtype."""
        found: Counter[str] = Counter()
        for kernel, count in self.kernels.items():
            if kernel.flops:
                found[str(kernel.dtype).removeprefix("torch.")] += kernel.flops * count  # type: ignore[assignment]
        return dict(found)

    def wire_bytes(self, device: DeviceRates) -> tuple[float, float]:
        """Bytes that the rank sends over NVLink, and over the network.

        What a group of several nodes sends counts for the network.
        """
        within = across = 0.0
        for key, size in self.wires.items():
            sent = key.wire_bytes(1) * size
            if _crosses_nodes(key, device):
                across += sent
            else:
                within += sent
        return within, across


@dataclass(frozen=True)
class Time:
    """Seconds of a phase by what they go to."""

    arithmetic: float
    memory: float
    launches: float  # beyond what the device computes meanwhile
    nvlink: float  # of collectives for which kernels wait; of others what is longer than these
    network: float
    host: float  # copies to and from host memory, and values that the host waits for

    @property
    def total(self) -> float:
        """Seconds of all."""
        return sum(vars(self).values())

    @property
    def bound(self) -> str:
        """Part that takes most of the time."""
        return max(vars(self), key=lambda name: vars(self)[name])


def time_of(amounts: Amounts, device: DeviceRates) -> Time:
    """Arithmetic and memory of every kernel, one after the other, then communication.

    Collectives that overlap with kernels take time only if all of them take longer than these.
    """
    arithmetic = memory = 0.0
    for kernel, count in amounts.kernels.items():
        computes = kernel.flops / device.flops(kernel.dtype, kernel.is_attention)
        moves = kernel.moved_bytes / (MEMORY_REACHED * device.memory)
        arithmetic += count * computes
        memory += count * max(moves, KERNEL_SECONDS - computes)
    launches = max(0.0, amounts.launches * LAUNCH_SECONDS - arithmetic - memory)
    seconds: Counter[tuple[bool, bool]] = Counter()  # by: overlaps, crosses nodes
    for key in {**amounts.calls, **amounts.wires}:
        if key.group_size > 1:
            calls = amounts.calls.get(key, 0.0)
            sent = key.wire_bytes(1) * amounts.wires.get(key, 0.0)
            time = sent / (WIRE_REACHED * _wire_rate(key, device)) + calls * COLLECTIVE_SECONDS
            seconds[key.overlaps, _crosses_nodes(key, device)] += time  # type: ignore[assignment]
    overlapping = seconds[True, False] + seconds[True, True]
    exposed = max(0.0, overlapping - arithmetic - memory - launches) / (overlapping or 1.0)
    return Time(
        arithmetic,
        memory,
        launches,
        seconds[False, False] + exposed * seconds[True, False],
        seconds[False, True] + exposed * seconds[True, True],
        amounts.others.get("copied_bytes", 0.0) / (WIRE_REACHED * device.host)
        + amounts.others.get("host_reads", 0.0) * READ_SECONDS,
    )


@dataclass(frozen=True)
class Measured:
    """One phase on one rank: counts of a step, memory by the place that allocated, and after it."""

    amounts: Amounts
    peaks: dict[str, Kinds]
    rest: Kinds  # alive once the phase is over

    @property
    def peak_at(self) -> str:
        """Phase in which memory is fullest."""
        return max(self.peaks, key=lambda place: total(self.peaks[place]))


def extrapolated(at: Mapping[int, Measured], layers: int) -> Measured:
    """The phase with ``layers`` layers, from what it took with one or two other numbers of them.

    Peaks are carried on place by place: which is the highest may change with the depth.
    """
    (low, first), *more = sorted(at.items())
    if not more:
        return first
    high, second = more[0]
    times = (layers - low) / (high - low)

    def line(one: Kinds, two: Kinds) -> Kinds:
        return {k: one.get(k, 0) + times * (two.get(k, 0) - one.get(k, 0)) for k in {**one, **two}}

    places = first.peaks.keys() & second.peaks.keys()
    return Measured(
        first.amounts.plus(second.amounts, times).plus(first.amounts, -times),
        {place: line(first.peaks[place], second.peaks[place]) for place in places},
        line(first.rest, second.rest),
    )


def fuller(one: dict[str, Kinds], other: Mapping[str, Kinds]) -> dict[str, Kinds]:
    """The higher peak of each place."""
    places = {**one}
    for place, kinds in other.items():
        if place not in places or total(kinds) > total(places[place]):
            places[place] = kinds
    return places


def peaks_of(record: Record) -> dict[str, Kinds]:
    """A record's peaks."""
    return {
        place: {kind: float(size) for kind, size in snapshot.kinds.items()}
        for place, snapshot in record.peaks.items()
    }


def total(kinds: Mapping[Kind, float]) -> float:
    """Bytes of all kinds."""
    return sum(kinds.values())


def _sum(one: Mapping[Key, float], other: Mapping[Key, float], times: float) -> dict[Key, float]:
    found = dict(one)
    for key, value in other.items():
        found[key] = found.get(key, 0.0) + times * value
    return {key: value for key, value in found.items() if value}


def _crosses_nodes(key: Collective, device: DeviceRates) -> bool:
    return len({rank // device.per_node for rank in key.ranks}) > 1


def _wire_rate(key: Collective, device: DeviceRates) -> float:
    """Bytes a second that a rank sends: over NVLink; or over the network cards of its node.

    NCCL makes a ring for each card of a node that has members, and every ring leaves the node once,
    so that members of one node share their cards. In an all-to-all each sends through its own.
    """
    if not _crosses_nodes(key, device):
        return device.nvlink
    members = Counter(rank // device.per_node for rank in key.ranks)
    cards = 1 if key.name.startswith(("alltoall", "send", "recv")) else min(members.values())
    return min(device.nvlink, cards * device.network)
