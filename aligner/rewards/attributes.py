"""Weighting of a reward model's ratings into the one number that an algorithm learns from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.errors import ConfigError


def check_weights(
    weights: Sequence[float] | None, attributes: Sequence[str], source: str
) -> Tensor | None:
    """Weights float32 [K] of K attributes; None where a single number is the reward.

    ``attributes``: none where the source gives one number for comparisons. ``source``: what gives
    them, for the message of a refusal.
    """
    count = max(1, len(attributes))
    if weights is None:
        if count == 1:
            return None
        raise ConfigError(
            f"{source} rates {count} attributes ({', '.join(attributes)}); give "
            f"reward.attribute_weights, {count} numbers in this order, for their weighted sum"
        )
    if len(weights) != count:
        raise ConfigError(
            f"reward.attribute_weights={list(weights)} has {len(weights)} numbers, and {source} "
            f"rates {count} ({', '.join(attributes) or 'one reward'}); give one for each"
        )
    return torch.tensor(weights, dtype=torch.float32)


def weighted(scores: Tensor, weights: Tensor | None) -> Tensor:
    """Rewards float32 [B] of scores [B] or [B, K]."""
    scores = scores.float()
    if weights is None:
        return scores.flatten()
    return (scores.reshape(len(scores), -1) * weights).sum(1)


def attribute_parts(scores: Tensor, attributes: Sequence[str]) -> dict[str, list[float]]:
    """Scores of each attribute by its name, of ``scores`` float [B, K]; empty where K is 1."""
    if len(attributes) < 2:
        return {}
    columns = scores.float().T.tolist()
    return dict(zip(attributes, columns, strict=True))
