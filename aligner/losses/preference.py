"""Direct preference optimisation and related losses.

``log π`` and ``log π_ref`` are the log-probabilities of a response under the policy and the frozen
reference, summed over its tokens. The implicit reward of the response is
``r = β·(log π - log π_ref)`` and the margin of a pair is ``m = r_chosen - r_rejected``. Losses are
means over the pairs of the global batch (`losses.pairs` describes the layout of a batch).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.config.fields import MinorShare, NonNegative, Positive
from aligner.losses.masked import CheckedLoss, counted_tokens, masked_sum, row_means
from aligner.losses.pairs import pairs_of, reward_metrics, split_pairs
from aligner.types import Denominators, TokenOutputs

RPODistance = Literal["square", "forward_kl", "backward_kl"]
# Log-ratios up to this size, in nats, may be rounding errors of equal policies (float32).
TIE = 1e-4


@dataclass(frozen=True)
class PairwiseLoss(CheckedLoss, ABC):
    """Base class of losses on preference pairs: a mean over pairs, plus an optional SFT term.

    The SFT term is ``sft_weight`` times the negative log-likelihood of the chosen response, as a
    mean over its tokens, then over pairs.

    Metrics are means over pairs: ``loss``, ``preference_loss`` (without the SFT term),
    ``rewards_chosen``, ``rewards_rejected``, ``rewards_margin``, ``accuracy`` (share of margins
    above ``β·TIE``), and with an SFT term ``sft_loss`` (before the weight).
    """

    beta: Positive = 0.1
    sft_weight: NonNegative = 0.0
    rows_per_group: ClassVar[int] = 2

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: log-probs of ``B / 2`` pairs, float [B, S]. ``batch``:
        ``token_mask`` [B, S], 1 for tokens of the response, ``sample_mask`` [B], equal in a pair,
        and for losses with a reference ``ref_logprobs``, float [B, S].
        """
        # Rewards of both rows of each pair.
        logprobs = outputs.values_or_logprobs
        pairs = pairs_of(batch, denominators)
        mask = counted_tokens(batch, logprobs) & pairs.rows().unsqueeze(1)
        chosen, rejected = split_pairs(self.beta * self._scores(logprobs, batch, mask))
        # Loss of the margins.
        loss = pairs.mean(self._losses(chosen - rejected, batch))
        metrics = {
            "preference_loss": loss,
            **reward_metrics(chosen, rejected, pairs, self.beta * TIE),
        }
        if self.sft_weight != 0:
            sft_loss = -pairs.mean(split_pairs(row_means(logprobs, mask))[0])
            loss = loss + self.sft_weight * sft_loss
            metrics["sft_loss"] = sft_loss
        metrics["loss"] = loss
        return loss, {name: value.detach() for name, value in metrics.items()}

    @abstractmethod
    def _scores(self, logprobs: Tensor, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Compute each row's reward divided by β, float [B]. ``mask`` is bool [B, S]."""

    @abstractmethod
    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of each pair from its reward ``margin``, both float [B / 2]."""


@dataclass(frozen=True)
class ReferenceLoss(PairwiseLoss):
    """Base class of pairwise losses with the reward ``β·(log π - log π_ref)`` of a response.

    ``average_logprobs``: average log-probs over the response's tokens instead of summing them.
    """

    average_logprobs: bool = False

    def _scores(self, logprobs: Tensor, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        ref_logprobs = batch["ref_logprobs"]
        assert ref_logprobs.shape == logprobs.shape, (ref_logprobs.shape, logprobs.shape)
        log_ratio = logprobs - ref_logprobs
        if self.average_logprobs:
            return row_means(log_ratio, mask)
        return masked_sum(log_ratio, mask, dim=1)


@dataclass(frozen=True)
class DPOLoss(ReferenceLoss):
    """DPO's loss ``-(1-ε)·log σ(m) - ε·log σ(-m)`` of the margin m (Rafailov et al., 2023).

    ``label_smoothing`` is ε, the assumed share of swapped labels (cDPO, Mitchell, 2023).
    """

    label_smoothing: MinorShare = 0.0  # at 0.5 or more the rejected responses would be preferred

    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        losses = -F.logsigmoid(margin)
        if self.label_smoothing == 0:
            return losses
        return (1 - self.label_smoothing) * losses - self.label_smoothing * F.logsigmoid(-margin)


@dataclass(frozen=True)
class IPOLoss(ReferenceLoss):
    """IPO's loss ``(m/β - 1/(2β))²`` of the margin m, minimal at m = 1/2 (Azar et al., 2023)."""

    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return ((margin - 0.5) / self.beta).square()


@dataclass(frozen=True)
class RPOLoss(ReferenceLoss):
    """Reward-aware preference optimisation (Sun et al., 2025), with NeMo-Aligner's formulas.

    The margin m is trained towards ``g = η·(R_chosen - R_rejected)``, the scaled difference of
    ground-truth rewards. With ``p = σ(m)`` and ``q = σ(g)``::

        square        (m - g)²
        forward_kl    KL(p ‖ q) = p·log(p/q) + (1-p)·log((1-p)/(1-q))
        backward_kl   KL(q ‖ p)

    ``reward_scale`` is η. The batch also contains ``ground_truth_rewards``, float [B].
    """

    distance: RPODistance = "backward_kl"
    reward_scale: Positive = 1.0

    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        chosen, rejected = split_pairs(batch["ground_truth_rewards"])
        gap = self.reward_scale * (chosen - rejected)
        if self.distance == "square":
            return (margin - gap).square()
        if self.distance == "forward_kl":
            return _bernoulli_kl(margin, gap)
        return _bernoulli_kl(gap, margin)


@dataclass(frozen=True)
class SimPOLoss(PairwiseLoss):
    """SimPO's loss ``-log σ(β·(mean log π_chosen - mean log π_rejected) - γ)``, Meng et al., 2024.

    Means are over the response's tokens. ``target_margin`` is γ itself, not γ/β.
    """

    beta: float = 2.0
    target_margin: float = 1.0

    def _scores(self, logprobs: Tensor, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        return row_means(logprobs, mask)

    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return -F.logsigmoid(margin - self.target_margin)


def _bernoulli_kl(p_logit: Tensor, q_logit: Tensor) -> Tensor:
    """Compute the KL divergence of Bernoulli distributions from their logits, elementwise."""
    heads = F.logsigmoid(p_logit) - F.logsigmoid(q_logit)
    tails = F.logsigmoid(-p_logit) - F.logsigmoid(-q_logit)
    return p_logit.sigmoid() * heads + (-p_logit).sigmoid() * tails


@dataclass(frozen=True)
class KTOLoss(CheckedLoss):
    """Kahneman–Tversky optimisation on single responses (Ethayarajh et al., 2024).

    Each response is labelled desirable or undesirable. With its log-ratio ``r = log π - log π_ref``
    and a baseline ``z``, the loss is the mean over the sequences of the global batch of::

        λ_D · (1 - σ(β·(r - z)))    for desirable responses, λ_D = desirable_weight
        λ_U · (1 - σ(β·(z - r)))    for undesirable responses, λ_U = undesirable_weight

    ``z`` estimates KL(π ‖ π_ref), without gradient, over the global batch (`kto_kl_baseline`). The
    paper and TRL estimate it over each micro-batch or rank.

    Metrics are means over sequences: ``loss``, ``rewards`` (``β·r``), ``rewards_margin``
    (``β·(r - z)``, negated for undesirable responses), ``accuracy`` (share of margins above
    ``β·TIE``), ``desirable_fraction`` and ``kl_baseline``.
    """

    beta: Positive = 0.1
    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: log-probs, float [B, S]. ``batch``: ``ref_logprobs`` [B, S],
        ``token_mask`` [B, S], ``sample_mask`` [B], ``desirable`` [B] (1: desirable, 0: undesirable)
        and ``kl_baseline``, float [B], where every row contains ``z``.
        """
        logprobs, ref_logprobs = outputs.values_or_logprobs, batch["ref_logprobs"]
        mask = counted_tokens(batch, logprobs, ref_logprobs)
        included, desirable = batch["sample_mask"].bool(), batch["desirable"].bool()
        # Distance of the rewards from the baseline, positive for better rows.
        rewards = self.beta * masked_sum(logprobs - ref_logprobs, mask, dim=1)
        baseline = batch["kl_baseline"].detach()
        gain = rewards - self.beta * baseline
        gain = torch.where(desirable, gain, -gain)
        # Loss of each row, weighted by its label.
        weights = gain.new_tensor([self.undesirable_weight, self.desirable_weight])
        losses = weights[desirable.long()] * (-gain).sigmoid()

        def mean(values: Tensor) -> Tensor:
            return torch.where(included, values, 0).sum() / denominators.valid_seqs

        loss = mean(losses)
        metrics = {
            "loss": loss,
            "rewards": mean(rewards),
            "rewards_margin": mean(gain),
            "accuracy": mean((gain > self.beta * TIE).to(gain.dtype)),
            "desirable_fraction": mean(desirable.to(gain.dtype)),
            "kl_baseline": mean(baseline),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


def kto_kl_baseline(
    logprobs: Tensor, ref_logprobs: Tensor, token_mask: Tensor, sample_mask: Tensor
) -> Tensor:
    """Compute KTO's baseline ``z = max(0, mean over rows of Σ mask·(logprob - ref_logprob))``.

    Rows are *mismatched*: each is a prompt of the global batch with the response to another prompt,
    so that log-ratios do not depend on how well the response fits. ``logprobs``, ``ref_logprobs``:
    float [B, S], computed before the optimizer step. ``token_mask``: [B, S], 1 for tokens of the
    response. ``sample_mask``: [B], 0 for excluded rows. Returns a scalar.
    """
    masks = {"token_mask": token_mask, "sample_mask": sample_mask}
    mask = counted_tokens(masks, logprobs, ref_logprobs)
    drift = masked_sum(logprobs.detach() - ref_logprobs, mask)
    return (drift / sample_mask.bool().sum().clamp(min=1)).clamp(min=0)
