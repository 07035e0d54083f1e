"""User-defined estimators of advantages, selected by path.

python examples/train_gpt_reinforce.py --config-name recipes/grpo_tiny_cpu \
    trainer.ppo.advantage.estimator=examples/extend/my_advantage.py:leave_one_out

`aligner.algorithms.ppo.user_estimator.AdvantageEstimator` describes the possible arguments.
"""

import torch
from torch import Tensor

from aligner.losses.advantages import generalized_advantage_estimate, token_rewards


def leave_one_out(
    rewards: Tensor, groups: Tensor, sample_mask: Tensor, scale: float = 1.0
) -> Tensor:
    """Compute RLOO: a response's reward minus the mean of the prompt's other responses, float [B].

    ``trainer.ppo.advantage.kwargs`` sets ``scale``.
    """
    is_valid = sample_mask.bool()
    in_group = (groups[:, None] == groups[None, :]) & is_valid[None, :]
    in_group.fill_diagonal_(False)
    reward = torch.where(is_valid, rewards, 0).double()
    count = in_group.sum(1)
    baseline = (in_group * reward).sum(1) / count.clamp(min=1)
    return torch.where(is_valid & (count > 0), scale * (reward - baseline), 0).float()


def gae(
    rewards: Tensor,
    penalty: Tensor,
    values: Tensor,
    token_mask: Tensor,
    discount_factor: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and the critic's targets as the built-in ``gae``, both float [B, S]."""
    per_token = token_rewards(rewards, penalty, token_mask, beta=1.0)
    return generalized_advantage_estimate(
        values, per_token, token_mask, discount_factor, gae_lambda
    )
