"""Advantages without a critic, from comparisons of samples, or of turns, inside groups.

The advantage is the reward r of a response, relative to the rewards of other responses:

================================  =================================================================
``reinforce``                     r, or with ``batch_baseline`` r minus the mean of the batch
                                  (Williams, 1992)
``rloo``                          r minus the mean of the *other* responses to the prompt (Kool et
                                  al., 2019, Ahmadian et al., 2024)
``grpo``                          (r - group mean) / (group std + 1e-6) (Shao et al., 2024)
``dr_grpo``                       r - group mean (Liu et al., 2025)
``reinforce_plus_plus``           returns of token rewards, whitened over all tokens of the batch
                                  (Hu et al., 2025)
``reinforce_plus_plus_baseline``  r - group mean, then whitened over all tokens of the batch
================================  =================================================================

``rewards``: float [B]. ``groups``: int64 [B], equal for responses to the same prompt, in any order.
``sample_mask``: [B], 0 for excluded samples, which get advantage 0 and are in no baseline.

A KL penalty (``penalty``) is subtracted from the reward before the baseline. The standard deviation
in ``grpo`` is computed without the penalty, because the noise of KL estimates alone would otherwise
produce large advantages. If all rewards of a group differ by at most `TOLERANCE`, its advantages
from a group baseline are exactly 0 (``reinforce_plus_plus_baseline``: before whitening). Standard
deviations are unbiased. Sums of rewards are float64. docs/environments.md#credit describes the
advantages of turns, docs/formulas.md the formulas of other libraries.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from aligner.losses.advantages import generalized_advantage_estimate, token_rewards
from aligner.losses.masked import masked_whiten

# Rewards are float32. A relative difference below 4 units in the last place is rounding.
TOLERANCE = 4 * torch.finfo(torch.float32).eps


def sum_of_group(values: Tensor, groups: Tensor) -> Tensor:
    """Return for each sample the sum of ``values`` [B] over its group, [B]."""
    _, index = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _compare_turns(
    returns: Tensor, penalised_returns: Tensor, has_turn: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor]:
    """Subtract from each turn's return the mean return of the group's other samples.

    ``returns``, ``penalised_returns``: float64 [B, K], without and with the KL penalty.
    ``has_turn``: bool [B, K], True if the sample reaches the turn. ``groups``: int64 [B].

    Returns advantages, float64 [B, K], 0 where the compared returns are equal, and the group's
    standard deviation, the largest of all turns, float64 [B, 1].
    """
    index = torch.arange(has_turn.shape[1], device=has_turn.device).expand(has_turn.shape)

    def sum_of_others(values: Tensor) -> Tensor:
        own_values = torch.where(has_turn, values, 0)
        return sum_of_group(own_values, groups) - own_values

    # Others may be shorter: compare with the latest turn, up to this one, that another sample has.
    n_others = sum_of_others(torch.ones_like(returns))
    last_shared = torch.where(n_others > 0, index, -1).cummax(1).values
    compared = last_shared.clamp(min=0)
    n_others = n_others.gather(1, compared).clamp(min=1)

    # Variance of the other samples at the compared turn together with the turn itself.
    squares = sum_of_others(returns.square()).gather(1, compared) + returns.square()
    mean = (sum_of_others(returns).gather(1, compared) + returns) / (n_others + 1)
    variance = (squares - (n_others + 1) * mean.square()).clamp(min=0) / n_others
    noise = TOLERANCE**2 * squares / (n_others + 1)  # variance that rounding alone can produce
    varies = has_turn & (last_shared >= 0) & (variance > noise)

    # Largest deviation of the group, for every row of the group.
    _, group = torch.unique(groups, return_inverse=True)
    row_largest = torch.where(varies, variance, 0).amax(1)
    largest = torch.zeros_like(row_largest).scatter_reduce(0, group, row_largest, "amax")
    deviation = largest[group].sqrt()
    baseline = sum_of_others(penalised_returns).gather(1, compared) / n_others
    return torch.where(varies, penalised_returns - baseline, 0), deviation.unsqueeze(1)


def discounted_returns(
    rewards: Tensor, mask: Tensor, gamma: float, *, turn_ids: Tensor | None = None
) -> Tensor:
    """Compute ``G_t = r_t + γ·G_{t+1}``, float [B, S], 0 at masked positions.

    ``t+1`` is the next generated token. ``rewards``: float [B, S]. Masked positions may contain any
    value. ``mask``: [B, S], 1 for generated tokens. ``turn_ids``: int64 [B, S], index of the turn
    that generated the token. Tokens are then ordered by turn, then by column.
    """
    # Without values, and with λ = 1, an advantage is the return.
    zero = torch.zeros((), dtype=rewards.dtype, device=rewards.device).expand_as(rewards)
    return generalized_advantage_estimate(
        zero, rewards, mask, gamma, 1.0, turn_ids=turn_ids, timestep="token"
    )[0]


def soft_overlong_penalty(lengths: Tensor, is_end: Tensor, max_length: int, cache: int) -> Tensor:
    """Compute DAPO's penalty for long responses (Yu et al., 2025, eq. 13), float32 [B].

    The penalty is added to the reward. It falls from 0 to -1 over the last ``cache`` tokens before
    ``max_length``::

        min(0, (max_length - cache - length) / cache)

    A response that a limit cut off gets -1. With ``cache=0`` all other responses get 0.
    ``lengths``: int64 [B], number of generated tokens. ``is_end``: bool [B], True if the model
    ended the response. ``max_length``: maximum number of generated tokens.
    """
    assert 0 <= cache <= max_length, (cache, max_length)
    assert lengths.shape == is_end.shape, (lengths.shape, is_end.shape)
    # Tokens over the start of the punished range.
    over = (lengths - (max_length - cache)).clamp(min=0).float()
    soft = -(over / max(1, cache)).clamp(max=1.0)
    return torch.where(is_end.bool(), soft, -1.0)


SampleEstimator = Literal["reinforce", "rloo", "grpo", "dr_grpo"]
TokenEstimator = Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline"]
CriticFreeEstimator = SampleEstimator | TokenEstimator

GRPO_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    sample_mask: Tensor,
    estimator: SampleEstimator,
    *,
    penalty: Tensor | None = None,
    batch_baseline: bool = False,
) -> Tensor:
    """Compute one advantage per response, float [B] in the dtype of ``rewards``.

    ``rewards``: float [B]. ``groups``: int64 [B], equal for responses to one prompt.
    ``sample_mask``: [B], 0 for excluded samples, which get 0. ``estimator``: see the table of this
    module. All except ``reinforce`` give exactly 0 to groups of equal rewards. ``penalty``: float
    [B], subtracted from each reward. Only ``reinforce`` reads ``batch_baseline``.
    """
    assert rewards.ndim == 1, rewards.shape
    shapes = rewards.shape, groups.shape, sample_mask.shape
    assert len(set(shapes)) == 1, shapes
    included = sample_mask.bool()
    # float64: in float32 the mean of equal rewards may differ from the rewards by a rounding error,
    # and GRPO would divide that error by a deviation of the same size.
    reward = torch.where(included, rewards, 0).double()
    penalised = reward if penalty is None else reward - torch.where(included, penalty, 0).double()
    if estimator == "reinforce":
        baseline = penalised.sum() / included.sum().clamp(min=1) if batch_baseline else 0.0
        return torch.where(included, penalised - baseline, 0).to(rewards.dtype)
    # Excluded samples are 0 in every sum, so no baseline depends on them.
    size = sum_of_group(included.double(), groups)
    advantage = penalised - sum_of_group(penalised, groups) / size.clamp(min=1)
    if estimator == "rloo":
        # r - (sum - r)/(n - 1) = (r - mean)·n/(n - 1)
        advantage = advantage * size / (size - 1).clamp(min=1)
    elif estimator == "grpo":
        # Unbiased standard deviation of the group's rewards, before any penalty.
        mean = sum_of_group(reward, groups) / size.clamp(min=1)
        squares = torch.where(included, reward - mean, 0).square()
        variance = sum_of_group(squares, groups) / (size - 1).clamp(min=1)
        advantage = advantage / (variance.sqrt() + GRPO_EPSILON)
    varies = has_reward_variance(rewards, groups, sample_mask)
    return torch.where(varies, advantage, 0).to(rewards.dtype)


def token_advantages(
    rewards: Tensor,
    groups: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor,
    estimator: CriticFreeEstimator,
    *,
    penalty: Tensor | None = None,
    discount: float = 1.0,
    batch_baseline: bool = False,
    turn_ids: Tensor | None = None,
) -> Tensor:
    """Compute critic-free advantages for the policy loss, float [B, S], 0 where a mask is 0.

    ``rewards``: float [B]. ``groups``: int64 [B], equal for responses to one prompt.
    ``token_mask``: [B, S], 1 for generated tokens. ``sample_mask``: [B], 0 for excluded samples.
    ``penalty``: float [B, S], β·kl of each token. ``reinforce_plus_plus`` subtracts it from the
    token's reward, other estimators subtract its sum from the response's reward. Only
    ``reinforce_plus_plus`` reads ``discount``, the factor γ between adjacent tokens. ``turn_ids``:
    int64 [B, S], index of the turn that generated the token. With ``turn_ids`` and ``rewards``
    float [B, S], turns are compared instead of responses (`turn_advantages`).
    """
    assert token_mask.ndim == 2, token_mask.shape
    generated = token_mask.bool() & sample_mask.bool().unsqueeze(1)
    if estimator == "reinforce_plus_plus":
        penalised = token_rewards(rewards, penalty, generated, beta=1.0, turn_ids=turn_ids)
        returns = discounted_returns(penalised, generated, discount, turn_ids=turn_ids)
        return masked_whiten(returns, generated)
    # Compare responses, or turns.
    whitens = estimator == "reinforce_plus_plus_baseline"
    formula: SampleEstimator = "dr_grpo" if whitens else estimator  # type: ignore[assignment]
    if turn_ids is not None and rewards.ndim == 2:
        advantages = turn_advantages(
            rewards, turn_ids, groups, sample_mask, formula, penalty=penalty
        )
    else:
        total = None if penalty is None else torch.where(generated, penalty, 0).sum(1)
        per_response = group_advantages(
            rewards, groups, sample_mask, formula, penalty=total, batch_baseline=batch_baseline
        )
        advantages = torch.where(generated, per_response.unsqueeze(1), 0)
    return masked_whiten(advantages, generated) if whitens else advantages


def turn_advantages(
    turn_rewards: Tensor,
    turn_ids: Tensor,
    groups: Tensor,
    sample_mask: Tensor,
    estimator: SampleEstimator,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """Compute critic-free advantages per turn, float [B, S], equal for all tokens of a turn.

    The advantage of turn t is its return (the rewards from turn t on) minus a baseline. The
    baseline is the mean return from turn t on, over the other samples of the group. If no other
    sample has turn t, it is computed from the latest earlier turn of others. ``reinforce`` has no
    baseline. ``dr_grpo`` and ``grpo`` multiply the advantage by (n - 1)/n with n samples in the
    group. ``grpo`` also divides by the standard deviation of returns in the group, the largest over
    the turns, so that no advantage is above sqrt(n). The advantage is exactly 0 if the compared
    returns are equal or the group has one sample, except for ``reinforce``.

    ``turn_rewards``: float [B, S], summed over the tokens of a turn. ``turn_ids``: int64 [B, S],
    index of the turn that generated the token, from 1, or 0 for other tokens, which get 0.
    ``groups``, ``sample_mask``: [B], see `group_advantages`. ``penalty``: float [B, S], subtracted
    from ``turn_rewards``. Tokens outside turns may have any reward or penalty.
    """
    assert turn_rewards.shape == turn_ids.shape, (turn_rewards.shape, turn_ids.shape)
    included = sample_mask.bool()
    generated = (turn_ids > 0) & included.unsqueeze(1)
    if not generated.any():
        return torch.zeros_like(turn_rewards)
    turn_index = torch.where(generated, turn_ids, 0)
    n_turns = int(turn_index.max())

    def by_turn(values: Tensor) -> Tensor:
        """Return sums over the tokens of a turn, float64 [B, turns]."""
        shape = len(turn_index), n_turns + 1
        # Slot 0 collects tokens without a turn.
        sums = torch.zeros(shape, dtype=torch.float64, device=turn_index.device)
        return sums.scatter_add_(1, turn_index, torch.where(generated, values, 0).double())[:, 1:]

    # Returns of turns: sums from a turn to the end of the conversation.
    has_turn = by_turn(torch.ones_like(turn_rewards)) > 0
    returns = _sums_to_end(by_turn(turn_rewards))
    # Subtract the penalty and the baseline.
    advantage = returns if penalty is None else returns - _sums_to_end(by_turn(penalty))
    if estimator != "reinforce":
        advantage, deviation = _compare_turns(returns, advantage, has_turn, groups)
        size = sum_of_group(included.double(), groups).unsqueeze(1)
        if estimator != "rloo":
            advantage = advantage * (size - 1) / size.clamp(min=1)
        if estimator == "grpo":
            advantage = advantage / (deviation + GRPO_EPSILON)
    # Spread the advantage of a turn over its tokens.
    token_values = advantage.gather(1, (turn_index - 1).clamp(min=0))
    return torch.where(generated, token_values, 0).to(turn_rewards.dtype)


def _sums_to_end(values: Tensor) -> Tensor:
    """Sum ``values`` [B, K] from each column to the last column, [B, K]."""
    return values.flip(1).cumsum(1).flip(1)


def has_reward_variance(
    rewards: Tensor, groups: Tensor, sample_mask: Tensor, turn_ids: Tensor | None = None
) -> Tensor:
    """Return bool [B], True for samples whose group has unequal rewards.

    Rewards that differ by a relative `TOLERANCE` are equal. A group of equal rewards has advantage
    0 with a group baseline, so DAPO (Yu et al., 2025) replaces it. ``rewards``: float [B], before
    length penalties. ``groups``: int64 [B]. ``sample_mask``: [B], 0 for excluded samples, which get
    False. With ``turn_ids``, int64 [B, S], ``rewards`` are [B, S] and returns of turns are
    compared.
    """
    included = sample_mask.bool()
    if turn_ids is not None:
        differs = turn_advantages(rewards, turn_ids, groups, sample_mask, "rloo").abs().amax(1)
        return included & (sum_of_group(differs, groups) > 0)
    _, index = torch.unique(groups, return_inverse=True)
    low, high = (
        torch.full_like(rewards, neutral).scatter_reduce(
            0, index, torch.where(included, rewards, neutral), extreme
        )
        for neutral, extreme in ((math.inf, "amin"), (-math.inf, "amax"))
    )
    varies = high - low > TOLERANCE * torch.maximum(low.abs(), high.abs())
    return included & varies[index]
