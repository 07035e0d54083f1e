"""A hash of 64-bit integers that torch computes alike on every device.

A random number made of it depends on the hashed numbers only, not on how many were made before, nor
on the device.
"""

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers: torch has no unsigned product.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
UNIFORM_BITS = 53  # of a hash become a uniform number, which float64 holds exactly


def as_int64(number: int) -> int:
    """A Python integer modulo 2**64, as torch's signed integers hold it."""
    return (number + 2**63) % 2**64 - 2**63


def mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every bit affects all.

    ``state``: int64 [...]; returns the same shape.
    """
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def combine(state: Tensor, counter: Tensor) -> Tensor:
    """Hash of ``state``, a hash itself, and one more number; both int64 [...], shapes broadcast."""
    return mix(state + _GAMMA) ^ mix(counter + _MIX_1)


def uniform_bits(state: Tensor) -> Tensor:
    """`UNIFORM_BITS` evenly distributed bits of a hash: int64 [...] to int64 [...] from 0 on."""
    return _shift_right(mix(state), 64 - UNIFORM_BITS)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own copies the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def counter_hash(seed: int, *counters: Tensor) -> Tensor:
    """Hash of a seed and of ``counters``, int64 [...]; the shapes broadcast."""
    state = torch.full_like(counters[0], as_int64(seed))
    for counter in counters:
        state = combine(state, counter)
    return state


class CallSeeds:
    """Seeds for calls that are given none: of the run's seed and the number of the call."""

    def __init__(self, seed: int) -> None:
        self._seed, self._calls = seed, 0

    def next(self) -> int:
        """The next call's."""
        self._calls += 1
        return int(counter_hash(self._seed, torch.tensor(self._calls)))
