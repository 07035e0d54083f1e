"""Penalty for responses that are too long."""

import torch
from torch import Tensor

from aligner.errors import ConfigError


def soft_overlong_penalty(lengths: Tensor, is_end: Tensor, max_length: int, cache: int) -> Tensor:
    """Term added to the reward: 0 for short responses, down to -1 for those at the limit.

    DAPO's soft punishment (Yu et al., 2025, eq. 13): over the last ``cache`` tokens before
    ``max_length`` it falls linearly from 0 to -1::

        min(0, (max_length - cache - length) / cache)

    A response that did not end was cut, so it is longer than the limit: -1 whatever its length.
    With ``cache=0`` nothing else is punished. (verl and OpenRLHF go only by the length; the same
    where every response that did not end has the full length.)

    ``lengths``: int64 [B], generated tokens. ``is_end``: bool [B], the response ended by itself.
    ``max_length``: most tokens a response may have. Returns float32 [B].
    """
    check_overlong(max_length, cache)
    assert lengths.shape == is_end.shape, (lengths.shape, is_end.shape)
    over = (lengths - (max_length - cache)).clamp(min=0).float()
    soft = -(over / max(1, cache)).clamp(max=1.0)
    return torch.where(is_end.bool(), soft, -1.0)


def check_overlong(max_length: int, cache: int) -> None:
    """Refuse a cache that does not fit into the response."""
    if not 0 <= cache <= max_length:
        raise ConfigError(
            f"overlong cache={cache} must be between 0 and max_length={max_length}, both in tokens"
        )
