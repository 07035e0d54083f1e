"""Losses of reward models: from comparisons and from ratings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.losses.masked import CheckedLoss, row_means
from aligner.losses.pairs import pairs_of, reward_metrics, split_pairs
from aligner.types import Denominators, TokenOutputs

BradleyTerryVariant = Literal["plain", "margin", "scaled"]


@dataclass(frozen=True)
class BradleyTerryLoss(CheckedLoss):
    """Bradley–Terry loss of a reward model's scores on preference pairs.

    With ``d = R_chosen - R_rejected`` and the labelled strength ``s`` of the preference::

        plain     -log σ(d)         (Ouyang et al., 2022)
        margin    -log σ(d - s)     (Llama 2, Touvron et al., 2023)
        scaled    -s·log σ(d)       (HelpSteer2-Preference, Wang et al., 2024)

    The loss is the mean over the pairs of the global batch (`losses.pairs`). With ``scaled``, a
    negative strength (the rejected response is better) counts as 0, because the loss would have no
    lower bound.

    Metrics are means over pairs: ``loss``, ``rewards_chosen``, ``rewards_rejected``,
    ``rewards_margin`` (d) and ``accuracy``.
    """

    variant: BradleyTerryVariant = "plain"
    rows_per_group: ClassVar[int] = 2

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the contribution of ``B / 2`` pairs to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: float [B, S], the head's output at each token, not shifted.
        ``batch``: ``input_lengths`` int64 [B], ``sample_mask`` [B], and except for ``plain``
        ``preference_strengths``, float [B], of which only chosen rows are read.
        """
        pairs = pairs_of(batch, denominators)
        scores = sequence_scores(outputs.values_or_logprobs, batch["input_lengths"])
        # Masked before the loss as well, because 0 · NaN would reach the gradient.
        chosen, rejected = split_pairs(torch.where(pairs.rows(), scores, 0))
        difference = chosen - rejected
        if self.variant == "plain":
            losses = -F.logsigmoid(difference)
        else:
            strength = split_pairs(batch["preference_strengths"])[0]
            if self.variant == "margin":
                losses = -F.logsigmoid(difference - strength)
            else:
                losses = -strength.clamp(min=0) * F.logsigmoid(difference)
        loss = pairs.mean(losses)
        return loss, {"loss": loss.detach(), **reward_metrics(chosen, rejected, pairs)}


@dataclass(frozen=True)
class AttributeRegressionLoss(CheckedLoss):
    """Squared error of a reward model's scores to ratings of ``K`` attributes (SteerLM).

    The squared errors are averaged over the rated attributes of a sequence, then over the sequences
    of the global batch. Ratings may be missing. A sequence without ratings must have
    ``sample_mask`` 0. Metrics are means over sequences: ``loss`` and ``absolute_error``.
    """

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        ``outputs.values_or_logprobs``: the head's output at each token, not shifted, float [B, S,
        K], or [B, S] for one attribute. ``batch``: ``input_lengths`` int64 [B], ``attributes``
        (ratings) float [B, K], ``attribute_mask`` [B, K] (1: rated), ``sample_mask`` [B].
        """
        # Scores and ratings of rated attributes, [B, K].
        scores = sequence_scores(outputs.values_or_logprobs, batch["input_lengths"])
        scores = scores.unsqueeze(1) if scores.ndim == 1 else scores
        ratings, rated = batch["attributes"], batch["attribute_mask"].bool()
        shapes = scores.shape, ratings.shape, rated.shape
        assert len(set(shapes)) == 1, shapes
        rated = rated & batch["sample_mask"].bool().unsqueeze(1)
        error = torch.where(rated, scores - ratings, 0)

        def mean(values: Tensor) -> Tensor:
            return row_means(values, rated).sum() / denominators.valid_seqs

        loss = mean(error.square())
        return loss, {"loss": loss.detach(), "absolute_error": mean(error.detach().abs())}


def sequence_scores(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Return the head's output at the last token of each sequence, float [B] or [B, K].

    ``outputs``: float [B, S] or [B, S, K], not shifted. ``lengths``: int64 [B], at least 1.
    """
    assert outputs.ndim in (2, 3), outputs.shape
    assert lengths.shape == outputs.shape[:1], (lengths.shape, outputs.shape)
    rows = torch.arange(outputs.shape[0], device=outputs.device)
    return outputs[rows, lengths.long() - 1]
