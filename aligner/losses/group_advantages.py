"""Advantages without a critic: a response's reward relative to other responses' rewards.

================================  =================================================================
``reinforce``                     r, or with ``batch_baseline`` r minus the mean of the batch
                                  (Williams, 1992; the baseline as OpenRLHF's flash_reinforce)
``rloo``                          r minus the mean of the *other* responses to the prompt (Kool et
                                  al., 2019; Ahmadian et al., 2024)
``grpo``                          (r - group mean) / (group std + 1e-6) (Shao et al., 2024)
``dr_grpo``                       r - group mean (Liu et al., 2025)
``reinforce_plus_plus``           returns of token rewards, whitened over all tokens of the batch
                                  (Hu et al., 2025)
``reinforce_plus_plus_baseline``  r - group mean, then whitened over all tokens of the batch
================================  =================================================================

``B`` responses, ``S`` tokens. ``rewards`` float [B]; ``groups`` int64 [B], equal where the prompt
is the same (in any order, groups of any size); ``sample_mask`` [B], 1 where the sample counts. A
sample that does not count gets advantage 0, is in no baseline, and its reward may hold
anything.

A KL penalty (``penalty``) comes off the reward before the baseline, and decides neither whether a
group has signal nor ``grpo``'s deviation: both are of the rewards before it. In a group that the
rewards do not distinguish all that is left is the noise of the KL estimate, and dividing it by its
own deviation would make full-size advantages of it. Such a group gets exactly 0 where its group is
the baseline (``reinforce_plus_plus_baseline``: before it is whitened). (Not refused with ``grpo``:
with only the deviation of the rewards the penalty holds the policy to its reference there as it
does with ``rloo`` and ``dr_grpo``.)

Where peers differ: the standard deviation is unbiased (verl, TRL, OpenRLHF) and 1e-6 is added to it
(verl; TRL 1e-4, OpenRLHF 1e-9, NeMo-RL not where it is 0); a group of one gets 0 where its group is
the baseline (NeMo-RL, TRL, verl's vectorised RLOO; verl's others keep its reward); whitening is by
the unbiased variance (verl; OpenRLHF and NeMo-RL by the population's).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.losses.advantages import discounted_returns, token_rewards
from aligner.losses.masked import masked_whiten

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
    """One advantage per response, float [B] in the dtype of ``rewards``; see the module.

    A group whose rewards are all equal gets exactly 0 from every estimator with a group baseline.
    ``penalty``: float [B], subtracted from each reward. ``batch_baseline`` is an option of
    ``reinforce`` only.
    """
    check_critic_free(estimator, batch_baseline=batch_baseline)
    assert rewards.ndim == 1, rewards.shape
    assert rewards.shape == groups.shape == sample_mask.shape, (
        rewards.shape,
        groups.shape,
        sample_mask.shape,
    )
    counts = sample_mask.bool()
    # float64: in float32 the mean of equal rewards may miss them by a rounding error, and GRPO
    # would divide that error by a deviation just as small.
    reward = torch.where(counts, rewards, 0).double()
    charged = reward if penalty is None else reward - torch.where(counts, penalty, 0).double()
    if estimator == "reinforce":
        baseline = charged.sum() / counts.sum().clamp(min=1) if batch_baseline else 0.0
        return torch.where(counts, charged - baseline, 0).to(rewards.dtype)
    # Samples that do not count weigh 0 in every sum, so they are in no baseline.
    size = _sum_of_group(counts.double(), groups)
    deviation = charged - _sum_of_group(charged, groups) / size.clamp(min=1)
    if estimator == "rloo":
        # r - (sum - r)/(n - 1) = (r - mean)·n/(n - 1)
        deviation = deviation * size / (size - 1).clamp(min=1)
    elif estimator == "grpo":
        apart = reward - _sum_of_group(reward, groups) / size.clamp(min=1)
        squares = _sum_of_group(torch.where(counts, apart, 0).square(), groups)
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        deviation = deviation / (std + GRPO_EPSILON)
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
) -> Tensor:
    """Advantages as the policy's loss takes them, float [B, S], 0 where a mask is 0.

    ``token_mask``: [B, S], 1 where the token was generated. ``penalty``: float [B, S], what each
    token takes off the reward (β·kl); masked positions may hold anything. REINFORCE++ charges it
    token by token, the others its sum over the response, before the baseline (as TRL's RLOO and
    verl; NeMo-RL's REINFORCE++ takes it off the advantage of the same token only). ``discount``
    is REINFORCE++'s.
    """
    check_critic_free(estimator, batch_baseline=batch_baseline, discount=discount)
    assert token_mask.ndim == 2, token_mask.shape
    generated = token_mask.bool() & sample_mask.bool().unsqueeze(1)
    if estimator == "reinforce_plus_plus":
        each = token_rewards(rewards, penalty, generated, beta=1.0)
        return masked_whiten(discounted_returns(each, generated, discount), generated)
    charged = None if penalty is None else torch.where(generated, penalty, 0).sum(1)
    whitened = estimator == "reinforce_plus_plus_baseline"
    of_sample: SampleEstimator = "dr_grpo" if whitened else estimator  # type: ignore[assignment]
    each = group_advantages(
        rewards, groups, sample_mask, of_sample, penalty=charged, batch_baseline=batch_baseline
    ).unsqueeze(1)
    spread = torch.where(generated, each, 0)
    return masked_whiten(spread, generated) if whitened else spread


def has_reward_variance(rewards: Tensor, groups: Tensor, sample_mask: Tensor) -> Tensor:
    """bool [B]: the sample counts and its group holds two different rewards among those that do.

    The others learn nothing from a group baseline; DAPO (Yu et al., 2025) samples other prompts in
    their place. ``rewards``: what is to differ, for DAPO the verdict of the verifier before any
    shaping by length.
    """
    counts = sample_mask.bool()
    _, index = torch.unique(groups, return_inverse=True)
    low = rewards.new_full(rewards.shape, float("inf")).scatter_reduce(
        0, index, torch.where(counts, rewards, float("inf")), "amin"
    )
    high = rewards.new_full(rewards.shape, float("-inf")).scatter_reduce(
        0, index, torch.where(counts, rewards, float("-inf")), "amax"
    )
    return counts & (low < high)[index]


def check_critic_free(
    estimator: str, *, batch_baseline: bool = False, discount: float = 1.0
) -> None:
    """Refuse an unknown estimator and options that are not its own."""
    known = [*get_args(SampleEstimator), *get_args(TokenEstimator)]
    if estimator not in known:
        raise ConfigError(
            f"advantage estimator {estimator!r} is unknown; use one of {', '.join(known)}"
        )
    if batch_baseline and estimator != "reinforce":
        raise ConfigError(
            f"batch_baseline=true is an option of reinforce; {estimator} has a baseline or "
            "whitening of its own, leave it out"
        )
    if discount != 1 and estimator != "reinforce_plus_plus":
        raise ConfigError(
            f"discount={discount} needs rewards per token, which only reinforce_plus_plus has; "
            f"use 1 with {estimator}"
        )


def _sum_of_group(values: Tensor, groups: Tensor) -> Tensor:
    """Sum of ``values`` [B] over the group of each sample, [B]."""
    _, index = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, index, values)[index]
