"""Interface of rewards, and rewards from the scores of a model or a reward server."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, RewardError
from aligner.rewards.function.runner import ScoredResponses
from aligner.rewards.protocol import Samples


def rated_responses(
    responses: list[str],
    scores: Tensor,
    attributes: Sequence[str],
    weights: Tensor | None,
    *,
    prompts: Sequence[str],
    source: str,
) -> ScoredResponses:
    """Return the rewards for a model's ``scores``: float [B], or [B, K] for K ``attributes``.

    ``weights``: float32 [K]. The reward is the weighted sum of the scores, or the single score if
    ``weights`` is None. ``source``: name of the model in messages. Raises `RewardError` if a reward
    is not finite.
    """
    scores = scores.float()
    rewards = scores.flatten()
    if weights is not None:
        rewards = (scores.reshape(len(scores), -1) * weights).sum(1)
    infinite = (~rewards.isfinite()).nonzero().flatten().tolist()
    if infinite:
        samples = Samples(list(prompts), responses, [None] * len(responses))
        raise RewardError(
            f"{source} rates {samples.describe(infinite[0])} with {rewards[infinite[0]]}, but a "
            "reward must be finite in float32. Check the model's weights"
        )
    parts = dict(zip(attributes, scores.T.tolist(), strict=True)) if len(attributes) > 1 else {}
    return ScoredResponses(responses, rewards, parts)


class RewardInterface(Protocol):
    """Scores the responses of a rollout."""

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every response of a rollout batch, with the columns of `Reward.get_rewards`."""
        ...


def check_weights(
    weights: Sequence[float] | None, attributes: Sequence[str], source: str
) -> Tensor | None:
    """Return ``weights`` as float32 [K], or None if a model with a single score has no weights.

    ``attributes``: names of the K scored attributes, empty if the model was trained on comparisons
    (then K = 1). ``source``: the model's name in messages. Raises `ConfigError` if there are not K
    weights.
    """
    count = max(1, len(attributes))
    if weights is None and count == 1:
        return None
    if weights is None:
        raise ConfigError(
            f"{source} rates {count} attributes ({', '.join(attributes)}), but "
            f"reward.attribute_weights is not set. Set it to {count} numbers: the reward is the "
            "weighted sum"
        )
    if len(weights) != count:
        raise ConfigError(
            f"reward.attribute_weights={list(weights)} has {len(weights)} numbers, but {source} "
            f"rates {count} ({', '.join(attributes) or 'one reward'}). Set one number for each"
        )
    return torch.tensor(weights, dtype=torch.float32)
