"""User-defined policy losses: ``model.ppo.loss=examples/extend/my_loss.py:ClippedLoss``.

python examples/train_gpt_ppo.py --config-name recipes/ppo_tiny_cpu \
    model.ppo.loss=examples/extend/my_loss.py:ClippedLoss

`aligner.losses.user.PolicyLoss` describes the arguments and the result.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from aligner.losses.masked import BatchAverage
from aligner.types import Denominators, TokenOutputs


class ClippedLoss:
    """PPO's clipped surrogate, with the same results as the built-in loss, to the bit."""

    def __init__(self, ratio_eps_low: float, ratio_eps_high: float) -> None:
        """Set the clip range. The run passes ``model.ppo.ratio_eps`` by these argument names."""
        self.low, self.high = 1 - ratio_eps_low, 1 + ratio_eps_high

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the share of the loss of one micro-batch."""
        logprobs = outputs.values_or_logprobs  # [B, S]
        mask = batch["token_mask"].bool() & batch["sample_mask"].bool()[:, None]
        # The sum over the unmasked tokens of the micro-batch, divided by the count of the global
        # batch.
        average = BatchAverage(mask, denominators)
        # Masked before exp, because the difference is arbitrary at masked positions.
        ratio = torch.where(mask, logprobs - batch["prev_logprobs"], 0).exp()
        advantages = torch.where(mask, batch["advantages"], 0)
        clipped = ratio.clamp(self.low, self.high)
        loss = average(torch.maximum(-advantages * ratio, -advantages * clipped))
        outside = (clipped != ratio).float()
        return loss, {"ppo_ratio": average(ratio), "outside_fraction": average(outside)}


class ReinforceLoss:
    """REINFORCE with an entropy bonus: the mean over tokens of ``-A·logprob - weight·entropy``.

    The loss uses no ratio and allows one pass over each rollout (``model.ppo.ppo_epochs=1``).
    """

    needs_entropy = True  # the run computes outputs.entropy

    def __init__(self, weight: float = 0.0) -> None:
        """Set the weight of the entropy, a key of ``model.ppo.loss_kwargs``."""
        self.weight = weight

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the share of the loss of one micro-batch."""
        assert outputs.entropy is not None
        counts = batch["token_mask"] * batch["sample_mask"][:, None]
        gain = batch["advantages"] * outputs.values_or_logprobs + self.weight * outputs.entropy
        loss = -torch.where(counts.bool(), gain, 0).sum() / denominators.valid_tokens
        entropy = torch.where(counts.bool(), outputs.entropy, 0).sum() / denominators.valid_tokens
        return loss, {"entropy": entropy}
