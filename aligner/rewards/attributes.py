"""Weighted sum of a reward model's ratings, the reward of a sample."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.errors import ConfigError


def check_weights(
    weights: Sequence[float] | None, attributes: Sequence[str], source: str
) -> Tensor | None:
    """Return the weights float32 [K] of K attributes, None if the reward is a single number.

    ``attributes``: empty if the source was trained on comparisons, with a single number per sample.
    ``source``: name of the source, for messages.
    """
    # Without attributes, the source gives one number per sample.
    count = max(1, len(attributes))
    if weights is None:
        if count == 1:
            return None
        raise ConfigError(
            f"{source} rates {count} attributes ({', '.join(attributes)}). Set "
            f"reward.attribute_weights to {count} numbers in this order, for their weighted sum"
        )
    if len(weights) != count:
        raise ConfigError(
            f"reward.attribute_weights={list(weights)} has {len(weights)} numbers, and {source} "
            f"rates {count} ({', '.join(attributes) or 'one reward'}). Set a number for each"
        )
    return torch.tensor(weights, dtype=torch.float32)


def weighted(scores: Tensor, weights: Tensor | None) -> Tensor:
    """Return rewards float32 [B] from scores [B] or [B, K]."""
    scores = scores.float()
    if weights is None:
        return scores.flatten()
    return (scores.reshape(len(scores), -1) * weights).sum(1)


def attribute_parts(scores: Tensor, attributes: Sequence[str]) -> dict[str, list[float]]:
    """Return the column of each attribute in ``scores`` float [B, K], an empty dict if K is 1."""
    if len(attributes) < 2:
        return {}
    columns = scores.float().T.tolist()
    return dict(zip(attributes, columns, strict=True))
