"""Amounts of phases, which can be added and scaled, and the time that a device needs for them.

Runs on the dry device are short: they have a few layers and one or two micro-batches. All counts
are linear in both, so two runs determine the counts of any other size.
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
    """Counts of a phase on one rank.

    ``counters``: launches, host_reads, copied_bytes.
    """

    kernels: dict[Kernel, float] = field(default_factory=dict)
    calls: dict[Collective, float] = field(default_factory=dict)
    wires: dict[Collective, float] = field(default_factory=dict)  # bytes of the larger operand
    counters: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record) -> "Amounts":
        """Return the amounts of a record."""
        return cls(
            {kernel: float(count) for kernel, count in record.kernels.items()},
            {key: float(calls) for key, (calls, _) in record.collectives.items()},
            {key: float(size) for key, (_, size) in record.collectives.items()},
            {
                name: float(getattr(record, name))
                for name in ("launches", "host_reads", "copied_bytes")
            },
        )

    def plus(self, addend: "Amounts", times: float = 1.0) -> "Amounts":
        """Return ``self + times * addend``."""
        return Amounts(
            _sum(self.kernels, addend.kernels, times),
            _sum(self.calls, addend.calls, times),
            _sum(self.wires, addend.wires, times),
            _sum(self.counters, addend.counters, times),
        )

    @property
    def launches(self) -> float:
        """Kernels that the host launches. A CUDA graph of many kernels is one launch."""
        return self.counters.get("launches", 0.0)

    @property
    def flops(self) -> dict[str, float]:
        """Floating-point operations by dtype."""
        flops: dict[str, float] = {}
        for kernel, count in self.kernels.items():
            if kernel.flops:
                dtype = str(kernel.dtype).removeprefix("torch.")
                flops[dtype] = flops.get(dtype, 0) + kernel.flops * count
        return flops

    def wire_bytes(self, device: DeviceRates) -> tuple[float, float]:
        """Return the bytes that the rank sends over NVLink, and over the network.

        All bytes of a group with members on several nodes count for the network.
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
    """Seconds of a phase by resource."""

    arithmetic: float
    memory: float
    launches: float  # beyond the time in which the device computes
    nvlink: float  # collectives that kernels wait for, and the excess of overlapping ones
    network: float
    host: float  # copies from and to host memory, and values that the host waits for

    @property
    def total(self) -> float:
        """Sum of all resources."""
        return sum(vars(self).values())

    @property
    def bound(self) -> str:
        """Resource with the largest share."""
        return max(vars(self), key=lambda name: vars(self)[name])


def time_of(amounts: Amounts, device: DeviceRates) -> Time:
    """Add up arithmetic and memory traffic of all kernels, then communication.

    Collectives that overlap with kernels only count for the time by which they exceed the kernels.
    """
    # Kernels run one after the other.
    arithmetic = memory = 0.0
    for kernel, count in amounts.kernels.items():
        computes = kernel.flops / device.flops(kernel.dtype, kernel.is_attention)
        moves = kernel.moved_bytes / (MEMORY_REACHED * device.memory)
        arithmetic += count * computes
        memory += count * max(moves, KERNEL_SECONDS - computes)
    launches = max(0.0, amounts.launches * LAUNCH_SECONDS - arithmetic - memory)
    # Collectives, by whether they overlap with kernels and cross nodes.
    seconds: dict[tuple[bool, bool], float] = {}
    for key in {**amounts.calls, **amounts.wires}:
        if key.group_size > 1:
            calls = amounts.calls.get(key, 0.0)
            sent = key.wire_bytes(1) * amounts.wires.get(key, 0.0)
            time = sent / (WIRE_REACHED * _wire_rate(key, device)) + calls * COLLECTIVE_SECONDS
            link = key.overlaps, _crosses_nodes(key, device)
            seconds[link] = seconds.get(link, 0.0) + time
    overlapping = [seconds.get((True, across), 0.0) for across in (False, True)]
    excess = max(0.0, sum(overlapping) - arithmetic - memory - launches)
    exposed = excess / (sum(overlapping) or 1.0)
    nvlink, network = (
        seconds.get((False, across), 0.0) + exposed * overlapping[across]
        for across in (False, True)
    )
    # Copies to the host and waits of the host.
    host = amounts.counters.get("copied_bytes", 0.0) / (WIRE_REACHED * device.host)
    host += amounts.counters.get("host_reads", 0.0) * READ_SECONDS
    return Time(arithmetic, memory, launches, nvlink, network, host)


@dataclass(frozen=True)
class Measured:
    """One phase on one rank: counts, peaks by the function that allocated, and remaining memory."""

    amounts: Amounts
    peaks: dict[str, Kinds]
    remaining: Kinds  # alive when the phase is over

    @property
    def peak_at(self) -> str:
        """Place of the highest peak."""
        return max(self.peaks, key=lambda location: total(self.peaks[location]))


def extrapolated(runs: Mapping[int, Measured], layers: int) -> Measured:
    """Extrapolate a phase to ``layers`` layers from one or two runs with other numbers of layers.

    Peaks are extrapolated place by place, because the highest one may change with the depth.
    """
    (low, first), *more = sorted(runs.items())
    if not more:
        return first
    high, second = more[0]
    times = (layers - low) / (high - low)

    def line(start: Kinds, end: Kinds) -> Kinds:
        return {
            kind: start.get(kind, 0) + times * (end.get(kind, 0) - start.get(kind, 0))
            for kind in {**start, **end}
        }

    return Measured(
        first.amounts.plus(second.amounts, times).plus(first.amounts, -times),
        {
            location: line(first.peaks[location], second.peaks[location])
            for location in first.peaks.keys() & second.peaks.keys()
        },
        line(first.remaining, second.remaining),
    )


def higher_peaks(first: dict[str, Kinds], second: Mapping[str, Kinds]) -> dict[str, Kinds]:
    """Return the higher peak of each location."""
    peaks = {**first}
    for location, kinds in second.items():
        if location not in peaks or total(kinds) > total(peaks[location]):
            peaks[location] = kinds
    return peaks


def peaks_of(record: Record) -> dict[str, Kinds]:
    """Return the peaks of a record by location and kind."""
    return {
        location: {kind: float(size) for kind, size in snapshot.kinds.items()}
        for location, snapshot in record.peaks.items()
    }


def total(kinds: Mapping[Kind, float]) -> float:
    """Return the bytes of all kinds."""
    return sum(kinds.values())


def _sum(first: Mapping[Key, float], second: Mapping[Key, float], times: float) -> dict[Key, float]:
    result = dict(first)
    for key, value in second.items():
        result[key] = result.get(key, 0.0) + times * value
    return {key: value for key, value in result.items() if value}


def _crosses_nodes(key: Collective, device: DeviceRates) -> bool:
    return len({rank // device.per_node for rank in key.ranks}) > 1


def _wire_rate(key: Collective, device: DeviceRates) -> float:
    """Return the bytes per second that a rank sends over NVLink or the network cards of its node.

    NCCL makes a ring for each card of a node with a member, and every ring leaves the node once.
    Members on one node therefore share their cards. In an all-to-all each member uses its own card.
    """
    if not _crosses_nodes(key, device):
        return device.nvlink
    members = Counter(rank // device.per_node for rank in key.ranks)
    cards = 1 if key.name.startswith(("alltoall", "send", "recv")) else min(members.values())
    return min(device.nvlink, cards * device.network)
