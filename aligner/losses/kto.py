"""Kahneman–Tversky optimisation: responses that are good or bad, not in pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.losses.masked import masked_sum
from aligner.types import Denominators, TokenOutputs


@dataclass(frozen=True)
class KTOLoss:
    """A response's log-ratio is compared with the policy's mean drift (Ethayarajh et al., 2024).

    With ``r = log π - log π_ref`` of a row, summed over its response, and the baseline ``z``::

        λ_D · (1 - σ(β·(r - z)))    for desirable rows
        λ_U · (1 - σ(β·(z - r)))    for the others

    as a mean over the sequences of the global batch. ``z`` estimates KL(π ‖ π_ref) and has no
    gradient; see `kto_kl_baseline` (the paper's and TRL's; theirs is the mean of each micro-batch
    or rank, ours of the global batch).

    Metrics are shares of means over sequences: ``loss``, ``rewards`` (``β·r``), ``rewards_margin``
    (``±β·(r - z)``, + where desirable), ``accuracy`` (that is positive), ``desirable_fraction`` and
    ``kl_baseline``.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    needs_entropy: ClassVar[bool] = False
    rows_per_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ConfigError(f"beta={self.beta} must be positive")
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0")

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric shares of one micro-batch.

        ``outputs.values_or_logprobs`` float [B, S]. From ``batch``: ``ref_logprobs``,
        ``token_mask`` [B, S], ``sample_mask`` [B], ``desirable`` [B] (1: good) and ``kl_baseline``
        float [B]: ``z``, the same number in every row of the global batch.
        """
        logprobs, token_mask = outputs.values_or_logprobs, batch["token_mask"]
        ref_logprobs = batch["ref_logprobs"]
        assert logprobs.ndim == 2, logprobs.shape
        assert logprobs.shape == token_mask.shape == ref_logprobs.shape, (
            logprobs.shape,
            token_mask.shape,
            ref_logprobs.shape,
        )
        counts, desirable = batch["sample_mask"].bool(), batch["desirable"].bool()
        mask = token_mask.bool() & counts.unsqueeze(1)
        rewards = self.beta * masked_sum(logprobs - ref_logprobs, mask, dim=1)
        baseline = batch["kl_baseline"].detach()
        gain = rewards - self.beta * baseline
        gain = torch.where(desirable, gain, -gain)
        weights = gain.new_tensor([self.undesirable_weight, self.desirable_weight])
        losses = weights[desirable.long()] * (-gain).sigmoid()

        def mean(values: Tensor) -> Tensor:
            return torch.where(counts, values, 0).sum() / denominators.valid_seqs

        loss = mean(losses)
        metrics = {
            "loss": loss,
            "rewards": mean(rewards),
            "rewards_margin": mean(gain),
            "accuracy": mean((gain > 0).to(gain.dtype)),
            "desirable_fraction": mean(desirable.to(gain.dtype)),
            "kl_baseline": mean(baseline),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


def kto_kl_baseline(
    logprobs: Tensor, ref_logprobs: Tensor, token_mask: Tensor, sample_mask: Tensor
) -> Tensor:
    """``z = max(0, mean over rows of Σ mask·(logprob - ref_logprob))``, a scalar.

    The rows, of a whole global batch, are *mismatched*: each prompt is followed by the response to
    another one (TRL: that of the row before), so that they show what the policy has come to prefer
    whatever the prompt. Both log-probs are of the weights that the update starts from.

    ``logprobs``, ``ref_logprobs``: float [B, S]; ``token_mask``: [B, S], 1 on the mismatched
    response's tokens; ``sample_mask``: [B].
    """
    assert logprobs.shape == ref_logprobs.shape == token_mask.shape, (
        logprobs.shape,
        ref_logprobs.shape,
        token_mask.shape,
    )
    mask = token_mask.bool() & sample_mask.bool().unsqueeze(1)
    drift = masked_sum(logprobs.detach() - ref_logprobs, mask)
    return (drift / sample_mask.bool().sum().clamp(min=1)).clamp(min=0)
