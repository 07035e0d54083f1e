"""Hash of 64-bit integers, equal on every device, for counter-based random numbers.

Such a random number depends only on the hashed integers, not on earlier calls or the device.
"""

import hashlib

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014) as signed integers, because torch has no unsigned product.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
UNIFORM_BITS = 53  # bits of a hash in a uniform number, which float64 represents exactly


def mix(state: Tensor) -> Tensor:
    """Mix the bits of ``state``, int64 [...], with SplitMix64's finaliser, a bijection."""
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def combine(state: Tensor, counter: Tensor) -> Tensor:
    """Return a hash of the hash ``state`` and the integer ``counter``, int64 [...], broadcast."""
    return mix(state + _GAMMA) ^ mix(counter + _MIX_1)


def uniform_bits(state: Tensor) -> Tensor:
    """Return `UNIFORM_BITS` uniform random bits for each hash in ``state``, int64 [...]."""
    return _shift_right(mix(state), 64 - UNIFORM_BITS)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros. torch's ``>>`` would repeat the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def counter_hash(seed: int, *counters: Tensor) -> Tensor:
    """Return a hash of ``seed`` modulo 2**64 and ``counters``, int64 [...], broadcast."""
    state = torch.full_like(counters[0], (seed + 2**63) % 2**64 - 2**63)
    for counter in counters:
        state = combine(state, counter)
    return state


def text_hash(*parts: object) -> int:
    """Return a hash from 0 to 2**63 - 1 of the texts of ``parts``, joined by spaces."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class CallSeeds:
    """Seeds for calls without a seed, derived from ``seed`` and the number of calls so far."""

    def __init__(self, seed: int) -> None:
        self._seed, self._calls = seed, 0

    def next(self) -> int:
        """Count a call and return its seed."""
        self._calls += 1
        return int(counter_hash(self._seed, torch.tensor(self._calls)))
