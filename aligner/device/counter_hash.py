"""A hash of 64-bit integers with the same result on every device.

A random number derived from the hash depends on the hashed integers only, not on the number of
earlier calls and not on the device.
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
    """Apply SplitMix64's finaliser to int64 [...]: a bijection, every bit affects all bits."""
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def combine(state: Tensor, counter: Tensor) -> Tensor:
    """Hash ``state``, a hash itself, with one more integer. Both int64 [...], shapes broadcast."""
    return mix(state + _GAMMA) ^ mix(counter + _MIX_1)


def uniform_bits(state: Tensor) -> Tensor:
    """Return `UNIFORM_BITS` uniformly distributed bits of a hash: int64 [...] to int64 [...]."""
    return _shift_right(mix(state), 64 - UNIFORM_BITS)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Shift without the sign, which torch's operator would copy."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def counter_hash(seed: int, *counters: Tensor) -> Tensor:
    """Return an int64 hash of ``seed`` modulo 2**64 and of ``counters``, int64 [...]."""
    state = torch.full_like(counters[0], (seed + 2**63) % 2**64 - 2**63)
    for counter in counters:
        state = combine(state, counter)
    return state


def text_hash(*parts: object) -> int:
    """Return a hash of the text of ``parts``, 0 <= hash < 2**63."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class CallSeeds:
    """Seeds for calls without a seed, derived from the run's seed and the index of the call."""

    def __init__(self, seed: int) -> None:
        self._seed, self._calls = seed, 0

    def next(self) -> int:
        """Return the seed of the next call."""
        self._calls += 1
        return int(counter_hash(self._seed, torch.tensor(self._calls)))
