"""Comparison of samples, and of turns of conversations, inside groups."""

import torch
from torch import Tensor

# Rewards are equal if their relative difference is below 4 units in the last place of float32, the
# dtype of the input.
TOLERANCE = 4 * torch.finfo(torch.float32).eps


def sum_of_group(values: Tensor, groups: Tensor) -> Tensor:
    """Return the sum of ``values`` [B] over the group of each sample, [B]."""
    _, index = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def compare_turns(
    worth: Tensor, charged: Tensor, has_turn: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor]:
    """Subtract from each turn's return the mean return of the group's other samples.

    ``worth``, ``charged``: float64 [B, K], return of each turn before and after the KL penalty.
    ``has_turn``: bool [B, K], the sample reaches the turn. ``groups``: int64 [B].

    Returns the advantages, float64 [B, K], 0 where the returns of the group are equal, and the
    largest standard deviation of a turn in the sample's group, float64 [B, 1].
    """
    index = torch.arange(has_turn.shape[1], device=has_turn.device).expand(has_turn.shape)

    def sum_of_others(values: Tensor) -> Tensor:
        own_values = torch.where(has_turn, values, 0)
        return sum_of_group(own_values, groups) - own_values

    # Others may be shorter: compare with the latest turn, up to this one, that another sample has.
    n_others = sum_of_others(torch.ones_like(worth))
    last_shared = torch.where(n_others > 0, index, -1).cummax(1).values
    compared = last_shared.clamp(min=0)
    n_others = n_others.gather(1, compared).clamp(min=1)

    # Variance of the other samples at the compared turn together with the turn itself.
    squares = sum_of_others(worth.square()).gather(1, compared) + worth.square()
    mean = (sum_of_others(worth).gather(1, compared) + worth) / (n_others + 1)
    variance = (squares - (n_others + 1) * mean.square()).clamp(min=0) / n_others
    noise = TOLERANCE**2 * squares / (n_others + 1)  # variance that rounding alone can produce
    varies = has_turn & (last_shared >= 0) & (variance > noise)

    # Largest deviation of the group, for every row of the group.
    _, group = torch.unique(groups, return_inverse=True)
    row_largest = torch.where(varies, variance, 0).amax(1)
    largest = torch.zeros_like(row_largest).scatter_reduce(0, group, row_largest, "amax")
    deviation = largest[group].sqrt()
    baseline = sum_of_others(charged).gather(1, compared) / n_others
    return torch.where(varies, charged - baseline, 0), deviation.unsqueeze(1)
