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


def _device(
    name: str,
    gigabytes: int,
    teraflops: tuple[float, float],
    memory: float,
    links: tuple[float, float, float],
    attention: float,
) -> DeviceRates:
    """Build a row from binary gigabytes, TFLOP/s and GB/s."""
    low, full = (rate * 1e12 for rate in teraflops)
    nvlink, network, host = (rate * 1e9 for rate in links)
    size = gigabytes << 30
    return DeviceRates(name, size, low, full, memory * 1e9, nvlink, network, host, attention)


_TABLE = (
    _device("a100-40g", 40, (312.0, 19.5), 1555.0, (300.0, 25.0, 25.0), 0.9),
    _device("a100-80g", 80, (312.0, 19.5), 2039.0, (300.0, 25.0, 25.0), 0.9),
    _device("l40s", 48, (362.0, 91.6), 864.0, (25.0, 12.5, 25.0), 0.9),  # PCIe, no NVLink
    _device("h100-80g", 80, (989.4, 66.9), 3350.0, (450.0, 50.0, 50.0), 0.7),
    _device("h200", 140, (989.4, 66.9), 4800.0, (450.0, 50.0, 50.0), 0.7),
    _device("b200", 180, (2250.0, 75.0), 8000.0, (900.0, 50.0, 50.0), 0.35),
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
