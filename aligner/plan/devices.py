"""Devices by name: how much they hold and how fast they are.

Rates are the makers' published peaks, dense, without sparsity. What of them is reached is one
number for each resource below: an assumption, in the range that well-tuned training reports, and
not measured by this project.
"""

import difflib
from dataclasses import dataclass

import torch

from aligner.errors import ConfigError

# Shares of the published peaks.
ARITHMETIC_REACHED = 0.70
MEMORY_REACHED = 0.80
WIRE_REACHED = 0.75
LAUNCH_SECONDS = 6e-6  # of the host, a kernel started from Python
READ_SECONDS = 15e-6  # of a value that the host waits for, beside what it waits for
COLLECTIVE_SECONDS = 15e-6  # before the first byte


@dataclass(frozen=True)
class DeviceRates:
    """One device. Rates in bytes or floating-point operations per second."""

    name: str
    memory_bytes: int
    low_precision: float  # bf16 products that add in float32
    float32: float
    memory: float
    nvlink: float  # to other devices of its node, each way
    network: float  # to other nodes, each way and per device
    host: float  # to host memory, each way
    per_node: int = 8

    def flops(self, dtype: torch.dtype) -> float:
        """Rate of matrix products of this dtype, in operations a second."""
        peak = self.low_precision if dtype.itemsize == 2 else self.float32
        return ARITHMETIC_REACHED * peak


def _device(
    name: str,
    gigabytes: int,
    teraflops: tuple[float, float],
    memory: float,
    links: tuple[float, float, float],
) -> DeviceRates:
    """``gigabytes`` as sold, which are binary; rates in TFLOP/s and GB/s."""
    low, full = (rate * 1e12 for rate in teraflops)
    nvlink, network, host = (rate * 1e9 for rate in links)
    return DeviceRates(name, gigabytes << 30, low, full, memory * 1e9, nvlink, network, host)


_TABLE = (
    _device("a100-40g", 40, (312.0, 19.5), 1555.0, (300.0, 25.0, 25.0)),
    _device("a100-80g", 80, (312.0, 19.5), 2039.0, (300.0, 25.0, 25.0)),
    _device("l40s", 48, (362.0, 91.6), 864.0, (25.0, 12.5, 25.0)),  # no NVLink: PCIe
    _device("h100-80g", 80, (989.4, 66.9), 3350.0, (450.0, 50.0, 50.0)),
    _device("h200", 140, (989.4, 66.9), 4800.0, (450.0, 50.0, 50.0)),
    _device("b200", 180, (2250.0, 75.0), 8000.0, (900.0, 50.0, 50.0)),
)
DEVICES = {device.name: device for device in _TABLE}


def device_named(name: str) -> DeviceRates:
    """The row of the table; `ConfigError` where there is none."""
    if name not in DEVICES:
        near = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"plan.device={name}: not in the table of devices; {hint}Known: {', '.join(DEVICES)}"
        )
    return DEVICES[name]
