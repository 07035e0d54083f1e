"""Table of devices: memory and rates.

Rates are the published peaks of the makers: dense, without sparsity. The reached share of a peak is
one constant per resource below, chosen so that estimates agree with published measurements
(`benchmarks.plan_published`). This project has measured none of these devices.
"""

import difflib
from dataclasses import dataclass

import torch

from aligner.errors import ConfigError

# Shares of the published peaks.
ARITHMETIC_REACHED = 0.68
MEMORY_REACHED = 0.80
WIRE_REACHED = 0.75
LAUNCH_SECONDS = 6e-6  # of the host for a kernel launched from Python
KERNEL_SECONDS = 2e-6  # of the device for the smallest kernel
READ_SECONDS = 15e-6  # of a value that the host waits for, in addition to the wait
COLLECTIVE_SECONDS = 15e-6  # before the first byte


@dataclass(frozen=True)
class DeviceRates:
    """One device. Rates are bytes or floating-point operations per second."""

    name: str
    memory_bytes: int
    low_precision: float  # bf16 products with float32 sums
    float32: float
    memory: float
    nvlink: float  # to other devices of its node, each way
    network: float  # to other nodes, each way and per device
    host: float  # to host memory, each way
    attention: float  # reached share of the peak, counting what a causal mask drops
    per_node: int = 8

    def flops(self, dtype: torch.dtype, is_attention: bool = False) -> float:
        """Return the reached rate of matrix products or attention of a dtype."""
        if dtype.itemsize != 2:
            return ARITHMETIC_REACHED * self.float32
        return (self.attention if is_attention else ARITHMETIC_REACHED) * self.low_precision


_TABLE = (
    DeviceRates("a100-40g", 40 << 30, 312e12, 19.5e12, 1555e9, 300e9, 25e9, 25e9, 0.9),
    DeviceRates("a100-80g", 80 << 30, 312e12, 19.5e12, 2039e9, 300e9, 25e9, 25e9, 0.9),
    DeviceRates(
        "l40s", 48 << 30, 362e12, 91.6e12, 864e9, 25e9, 12.5e9, 25e9, 0.9
    ),  # PCIe, no NVLink
    DeviceRates("h100-80g", 80 << 30, 989.4e12, 66.9e12, 3350e9, 450e9, 50e9, 50e9, 0.7),
    DeviceRates("h200", 140 << 30, 989.4e12, 66.9e12, 4800e9, 450e9, 50e9, 50e9, 0.7),
    DeviceRates("b200", 180 << 30, 2250e12, 75e12, 8000e9, 900e9, 50e9, 50e9, 0.35),
)
DEVICES = {device.name: device for device in _TABLE}


def device_named(name: str) -> DeviceRates:
    """Return a device of the table, or raise `ConfigError`."""
    if name not in DEVICES:
        near = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"plan.device={name}: not in the table of devices; {hint}Known: {', '.join(DEVICES)}"
        )
    return DEVICES[name]
