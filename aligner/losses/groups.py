"""Comparison of samples, and of turns of conversations, inside groups."""

import torch
from torch import Tensor

# Rewards that differ by less, relative to themselves, are equal: 4 units in the last place of the
# float32 that they come in.
TOLERANCE = 4 * torch.finfo(torch.float32).eps


def sum_of_group(values: Tensor, groups: Tensor) -> Tensor:
    """Sum of ``values`` [B] over the group of each sample, [B]."""
    _, index = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def compare_turns(
    worth: Tensor, charged: Tensor, there: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor]:
    """Turns less their baselines, and the largest deviation of turns of the group, by row.

    ``worth``, ``charged``: float64 [B, K], without and with the penalty. ``there``: bool [B, K].
    ``groups``: int64 [B]. Returns float64 [B, K], 0 where nothing differs, and [B, 1].
    """
    number = torch.arange(there.shape[1], device=there.device).expand(there.shape)

    def of_others(values: Tensor) -> Tensor:
        own = torch.where(there, values, 0)
        return sum_of_group(own, groups) - own

    others = of_others(torch.ones_like(worth))
    last = torch.where(others > 0, number, -1).cummax(1).values  # turn that others came to
    place = last.clamp(min=0)
    others = others.gather(1, place).clamp(min=1)
    # Of the others at that turn, and of the turn itself beside them.
    squares = of_others(worth.square()).gather(1, place) + worth.square()
    mean = (of_others(worth).gather(1, place) + worth) / (others + 1)
    variance = (squares - (others + 1) * mean.square()).clamp(min=0) / others
    noise = TOLERANCE**2 * squares / (others + 1)
    varies = there & (last >= 0) & (variance > noise)
    _, group = torch.unique(groups, return_inverse=True)
    most = torch.where(varies, variance, 0).amax(1)
    deviation = torch.zeros_like(most).scatter_reduce(0, group, most, "amax")[group].sqrt()
    baseline = of_others(charged).gather(1, place) / others
    return torch.where(varies, charged - baseline, 0), deviation.unsqueeze(1)
