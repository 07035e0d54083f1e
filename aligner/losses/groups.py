"""Advantages without a critic, from comparisons of samples, or of turns, inside groups.

Without a critic, an advantage is a response's reward relative to the rewards of other responses:

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

``B`` responses, ``S`` tokens. ``rewards`` float [B]. ``groups`` int64 [B], equal for responses to
the same prompt, in any order. ``sample_mask`` [B], 1 if the sample counts. Other samples get
advantage 0 and enter no baseline. Their reward may be any value.

A KL penalty (``penalty``) is subtracted from the reward before the baseline. ``grpo``'s deviation,
and whether the rewards of a group differ, depend on the rewards without the penalty: division by
the deviation of the KL estimate's noise would produce full-size advantages. A group of equal
rewards gets exactly 0 if the group is the baseline (``reinforce_plus_plus_baseline``: before
whitening), and a group of one 0. Standard deviations are unbiased. Sums of rewards are float64.
Values that differ by at most `TOLERANCE` are equal. docs/environments.md#credit describes the
advantages of turns, docs/formulas.md the formulas of other libraries.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from aligner.losses.advantages import generalized_advantage_estimate, token_rewards
from aligner.losses.masked import masked_whiten

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


def discounted_returns(
    rewards: Tensor, mask: Tensor, gamma: float, *, turn_ids: Tensor | None = None
) -> Tensor:
    """Compute ``G_t = r_t + γ·G_{t+1}`` over generated tokens, 0 at masked positions.

    ``rewards``: float [B, S], any value at masked positions. ``mask``: [B, S]. ``turn_ids``: int64
    [B, S], the order of tokens as in `generalized_advantage_estimate`. Holes in the mask are
    skipped. Computed in float32 at least.
    """
    # Without values, and with λ = 1, an advantage is the return.
    zero = torch.zeros((), dtype=rewards.dtype, device=rewards.device).expand_as(rewards)
    return generalized_advantage_estimate(
        zero, rewards, mask, gamma, 1.0, turn_ids=turn_ids, timestep="token"
    )[0]


def soft_overlong_penalty(lengths: Tensor, is_end: Tensor, max_length: int, cache: int) -> Tensor:
    """Compute a reward term: 0 for short responses, down to -1 for responses at the limit.

    DAPO's soft punishment (Yu et al., 2025, eq. 13) over the last ``cache`` tokens before
    ``max_length``::

        min(0, (max_length - cache - length) / cache)

    A response that did not end gets -1. With ``cache=0`` only such responses are punished.
    ``lengths``: int64 [B], generated tokens. ``is_end``: bool [B], the response ended by itself.
    ``max_length``: limit of a response in tokens. Returns float32 [B].
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

    A group of equal rewards gets exactly 0 from every estimator with a group baseline. ``penalty``:
    float [B], subtracted from each reward. Only ``reinforce`` reads ``batch_baseline``.
    """
    assert rewards.ndim == 1, rewards.shape
    shapes = rewards.shape, groups.shape, sample_mask.shape
    assert len(set(shapes)) == 1, shapes
    counts = sample_mask.bool()
    # float64: in float32 the mean of equal rewards may differ from the rewards by a rounding error,
    # and GRPO would divide that error by a deviation of the same size.
    reward = torch.where(counts, rewards, 0).double()
    charged = reward if penalty is None else reward - torch.where(counts, penalty, 0).double()
    if estimator == "reinforce":
        baseline = charged.sum() / counts.sum().clamp(min=1) if batch_baseline else 0.0
        return torch.where(counts, charged - baseline, 0).to(rewards.dtype)
    # Samples that do not count weigh 0 in every sum, so no baseline includes such samples.
    size = sum_of_group(counts.double(), groups)
    deviation = charged - sum_of_group(charged, groups) / size.clamp(min=1)
    if estimator == "rloo":
        # r - (sum - r)/(n - 1) = (r - mean)·n/(n - 1)
        deviation = deviation * size / (size - 1).clamp(min=1)
    elif estimator == "grpo":
        # Unbiased standard deviation of the group's rewards, before any penalty.
        mean = sum_of_group(reward, groups) / size.clamp(min=1)
        squares = torch.where(counts, reward - mean, 0).square()
        variance = sum_of_group(squares, groups) / (size - 1).clamp(min=1)
        deviation = deviation / (variance.sqrt() + GRPO_EPSILON)
    varies = has_reward_variance(rewards, groups, sample_mask)
    return torch.where(varies, deviation, 0).to(rewards.dtype)


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
    """Compute the advantages for the policy loss, float [B, S], 0 where a mask is 0.

    ``token_mask``: [B, S], 1 if the token was generated. ``penalty``: float [B, S], subtracted from
    the reward at each token (β·kl), any value at masked positions. REINFORCE++ charges the penalty
    token by token, other estimators charge the sum over the response, before the baseline. Only
    REINFORCE++ reads ``discount``. ``turn_ids``: int64 [B, S], the order of tokens in
    conversations. If ``rewards`` are float [B, S], turns are compared (`turn_advantages`).
    """
    assert token_mask.ndim == 2, token_mask.shape
    generated = token_mask.bool() & sample_mask.bool().unsqueeze(1)
    if estimator == "reinforce_plus_plus":
        charged_rewards = token_rewards(rewards, penalty, generated, beta=1.0, turn_ids=turn_ids)
        returns = discounted_returns(charged_rewards, generated, discount, turn_ids=turn_ids)
        return masked_whiten(returns, generated)
    # Compare responses, or turns.
    whitens = estimator == "reinforce_plus_plus_baseline"
    formula: SampleEstimator = "dr_grpo" if whitens else estimator  # type: ignore[assignment]
    if turn_ids is not None and rewards.ndim == 2:
        advantages = turn_advantages(
            rewards, turn_ids, groups, sample_mask, formula, penalty=penalty
        )
    else:
        charged = None if penalty is None else torch.where(generated, penalty, 0).sum(1)
        per_response = group_advantages(
            rewards, groups, sample_mask, formula, penalty=charged, batch_baseline=batch_baseline
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
    """Compute critic-free advantages per turn, float [B, S], 0 outside turns and if masked.

    The baseline of turn t is the mean return of the group's other samples from turn t on. If no
    other sample has turn t, the latest earlier turn of another sample is used. The baseline does
    not depend on the sample itself, so it is unbiased. ``dr_grpo`` and ``grpo`` multiply by
    (n - 1)/n with n samples in the group. ``grpo`` also divides by the largest standard deviation
    of the returns of a turn in the group, so that no advantage is above sqrt(n).

    ``turn_rewards``: float [B, S], the rewards of a turn at tokens of the turn. ``turn_ids``: int64
    [B, S], index of the turn that generated a token, from 1, or 0 without a turn. ``penalty``:
    float [B, S], subtracted from the reward at each token. Positions outside turns may be any
    value. With ``rloo``, ``dr_grpo`` and ``grpo`` the advantage is exactly 0 if the compared
    returns are equal or the group has one sample.
    """
    assert turn_rewards.shape == turn_ids.shape, (turn_rewards.shape, turn_ids.shape)
    counts = sample_mask.bool()
    generated = (turn_ids > 0) & counts.unsqueeze(1)
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
    worth = _to_go(by_turn(turn_rewards))
    # Subtract the penalty and the baseline.
    advantage = worth if penalty is None else worth - _to_go(by_turn(penalty))
    if estimator != "reinforce":
        advantage, deviation = compare_turns(worth, advantage, has_turn, groups)
        size = sum_of_group(counts.double(), groups).unsqueeze(1)
        if estimator != "rloo":
            advantage = advantage * (size - 1) / size.clamp(min=1)
        if estimator == "grpo":
            advantage = advantage / (deviation + GRPO_EPSILON)
    # Spread the advantage of a turn over its tokens.
    token_values = advantage.gather(1, (turn_index - 1).clamp(min=0))
    return torch.where(generated, token_values, 0).to(turn_rewards.dtype)


def _to_go(values: Tensor) -> Tensor:
    """Return sums of each entry of [B, K] and all later entries of the row."""
    return values.flip(1).cumsum(1).flip(1)


def has_reward_variance(
    rewards: Tensor, groups: Tensor, sample_mask: Tensor, turn_ids: Tensor | None = None
) -> Tensor:
    """Return bool [B], True for unmasked samples whose group has unequal rewards.

    Rewards that differ by rounding are equal (`TOLERANCE`). Samples with False learn nothing from a
    group baseline, so DAPO (Yu et al., 2025) replaces them. ``rewards``: float [B], before any
    shaping by length. With ``turn_ids`` int64 [B, S], ``rewards`` are [B, S] and turns are
    compared.
    """
    counts = sample_mask.bool()
    if turn_ids is not None:
        differs = turn_advantages(rewards, turn_ids, groups, sample_mask, "rloo").abs().amax(1)
        return counts & (sum_of_group(differs, groups) > 0)
    _, index = torch.unique(groups, return_inverse=True)
    low, high = (
        torch.full_like(rewards, idle).scatter_reduce(
            0, index, torch.where(counts, rewards, idle), extreme
        )
        for idle, extreme in ((math.inf, "amin"), (-math.inf, "amax"))
    )
    varies = high - low > TOLERANCE * torch.maximum(low.abs(), high.abs())
    return counts & varies[index]
