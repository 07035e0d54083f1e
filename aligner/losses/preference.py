"""Direct preference optimisation and its relatives: losses on pairs of log-probabilities.

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
# Tolerance for log-ratios of a policy to itself, in nats, which differ from 0 by float32 rounding.
TIE = 1e-4


@dataclass(frozen=True)
class PairwiseLoss(CheckedLoss, ABC):
    """Base of pairwise losses. A loss is a mean over pairs, plus an optional SFT term.

    ``sft_weight`` adds ``-mean log π`` of the chosen response: the mean over its tokens, then over
    pairs.

    Metrics are means over pairs: ``loss``, ``preference_loss``, ``rewards_chosen``,
    ``rewards_rejected``, ``rewards_margin``, ``accuracy`` (margins above ``β·TIE``), and with an
    SFT term ``sft_loss`` (unweighted).
    """

    beta: Positive = 0.1
    sft_weight: NonNegative = 0.0
    rows_per_group: ClassVar[int] = 2

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what a micro-batch of ``B / 2`` pairs adds to the loss and to the metrics.

        ``outputs.values_or_logprobs``: float [B, S]. ``batch``: ``token_mask`` [B, S], 1 at the
        response's tokens, ``sample_mask`` [B], equal in a pair, and with a reference
        ``ref_logprobs`` float [B, S].
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
        """Compute the reward of each row before β, float [B]."""

    @abstractmethod
    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of each pair from its ``margin``, float [B / 2]."""


@dataclass(frozen=True)
class ReferenceLoss(PairwiseLoss):
    """Pairwise loss whose reward is the log-ratio to a reference.

    ``average_logprobs``: use the mean over the response's tokens instead of the sum.
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
    """``-(1-ε)·log σ(m) - ε·log σ(-m)`` (Rafailov et al., 2023).

    ``label_smoothing`` ε: the assumed share of swapped labels (cDPO, Mitchell, 2023).
    """

    label_smoothing: MinorShare = 0.0  # at 0.5 or more the rejected responses would be preferred

    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        losses = -F.logsigmoid(margin)
        if self.label_smoothing == 0:
            return losses
        return (1 - self.label_smoothing) * losses - self.label_smoothing * F.logsigmoid(-margin)


@dataclass(frozen=True)
class IPOLoss(ReferenceLoss):
    """``(m/β - 1/(2β))²``, whose target for the margin is 1/2, not infinity (Azar et al., 2023).

    Log-probabilities are summed, or with ``average_logprobs=True`` averaged over the response.
    """

    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return ((margin - 0.5) / self.beta).square()


@dataclass(frozen=True)
class RPOLoss(ReferenceLoss):
    """Reward-aware preference optimisation (Sun et al., 2025), as NeMo-Aligner defines it.

    The target of the margin is ``g = η·(R_chosen - R_rejected)``, the gap of ground-truth rewards,
    so that the margin of an almost equal pair stays small. With ``p = σ(m)`` and ``q = σ(g)``::

        square        (m - g)²
        forward_kl    KL(p ‖ q) = p·log(p/q) + (1-p)·log((1-p)/(1-q))
        backward_kl   KL(q ‖ p)

    ``reward_scale`` is η. The batch also contains ``ground_truth_rewards`` float [B].
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
    """``-log σ(β·(mean log π_chosen - mean log π_rejected) - γ)`` (Meng et al., 2024).

    Log-probabilities are means over the response's tokens. ``target_margin`` is γ itself, not γ/β.
    """

    beta: float = 2.0
    target_margin: float = 1.0

    def _scores(self, logprobs: Tensor, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        return row_means(logprobs, mask)

    def _losses(self, margin: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return -F.logsigmoid(margin - self.target_margin)


def _bernoulli_kl(p_logit: Tensor, q_logit: Tensor) -> Tensor:
    """Compute KL(σ(p_logit) ‖ σ(q_logit)) of two Bernoulli distributions, elementwise."""
    heads = F.logsigmoid(p_logit) - F.logsigmoid(q_logit)
    tails = F.logsigmoid(-p_logit) - F.logsigmoid(-q_logit)
    return p_logit.sigmoid() * heads + (-p_logit).sigmoid() * tails


@dataclass(frozen=True)
class KTOLoss(CheckedLoss):
    """Loss of a labelled response against the policy's mean drift (Ethayarajh et al., 2024).

    Kahneman–Tversky optimisation reads single responses labelled good or bad.

    With ``r = log π - log π_ref`` of a row, summed over its response, and the baseline ``z``::

        λ_D · (1 - σ(β·(r - z)))    for desirable rows
        λ_U · (1 - σ(β·(z - r)))    for undesirable rows

    The loss is the mean over the sequences of the global batch. ``z`` estimates KL(π ‖ π_ref) over
    the global batch without gradient (`kto_kl_baseline`, in the paper and TRL over each micro-batch
    or rank).

    Metrics are means over sequences: ``loss``, ``rewards`` (``β·r``), ``rewards_margin`` (``±β·(r -
    z)``, + for desirable rows), ``accuracy`` (the margin is above ``β·TIE``),
    ``desirable_fraction`` and ``kl_baseline``.
    """

    beta: Positive = 0.1
    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what one micro-batch adds to the loss and to the metrics.

        ``outputs.values_or_logprobs``: float [B, S]. ``batch``: ``ref_logprobs`` [B, S],
        ``token_mask`` [B, S], ``sample_mask`` [B], ``desirable`` [B] (1 means good) and
        ``kl_baseline`` float [B], ``z`` in every row.
        """
        logprobs, ref_logprobs = outputs.values_or_logprobs, batch["ref_logprobs"]
        mask = counted_tokens(batch, logprobs, ref_logprobs)
        counts, desirable = batch["sample_mask"].bool(), batch["desirable"].bool()
        # Distance of the rewards from the baseline, positive for better rows.
        rewards = self.beta * masked_sum(logprobs - ref_logprobs, mask, dim=1)
        baseline = batch["kl_baseline"].detach()
        gain = rewards - self.beta * baseline
        gain = torch.where(desirable, gain, -gain)
        # Loss of each row, weighted by its label.
        weights = gain.new_tensor([self.undesirable_weight, self.desirable_weight])
        losses = weights[desirable.long()] * (-gain).sigmoid()

        def mean(values: Tensor) -> Tensor:
            return torch.where(counts, values, 0).sum() / denominators.valid_seqs

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
    """Compute ``z = max(0, mean over rows of Σ mask·(logprob - ref_logprob))``, a scalar.

    The rows of the global batch are *mismatched*: each prompt is followed by the response to
    another prompt, so that log-ratios show preferences that do not depend on the prompt. Both
    log-probs use the weights before the update. ``logprobs``, ``ref_logprobs``: float [B, S].
    ``token_mask``: [B, S], 1 at the tokens of the mismatched response. ``sample_mask``: [B].
    """
    masks = {"token_mask": token_mask, "sample_mask": sample_mask}
    mask = counted_tokens(masks, logprobs, ref_logprobs)
    drift = masked_sum(logprobs.detach() - ref_logprobs, mask)
    return (drift / sample_mask.bool().sum().clamp(min=1)).clamp(min=0)
