"""Estimators of advantages of one's own, by path.

python examples/train_gpt_reinforce.py --config-name recipes/grpo_tiny_cpu \
    trainer.ppo.advantage.estimator=examples/extend/my_advantage.py:leave_one_out

What such a function may name: `aligner.algorithms.ppo.user_estimator.AdvantageEstimator`.
"""

import torch
from torch import Tensor

from aligner.losses.advantages import generalized_advantage_estimate, token_rewards


def leave_one_out(
    rewards: Tensor, groups: Tensor, sample_mask: Tensor, scale: float = 1.0
) -> Tensor:
    """RLOO, float [B]: a response's reward less the mean of the prompt's other responses.

    ``scale`` comes from ``trainer.ppo.advantage.kwargs``.
    """
    counts = sample_mask.bool()
    same = (groups[:, None] == groups[None, :]) & counts[None, :]
    same.fill_diagonal_(False)
    reward = torch.where(counts, rewards, 0).double()
    others = same.sum(1)
    baseline = (same * reward).sum(1) / others.clamp(min=1)
    return torch.where(counts & (others > 0), scale * (reward - baseline), 0).float()


def gae(
    rewards: Tensor,
    penalty: Tensor,
    values: Tensor,
    token_mask: Tensor,
    discount_factor: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """What the built-in ``gae`` does: advantages and the critic's targets, both [B, S]."""
    each = token_rewards(rewards, penalty, token_mask, beta=1.0)
    return generalized_advantage_estimate(values, each, token_mask, discount_factor, gae_lambda)
