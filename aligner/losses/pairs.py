"""Pairs of a chosen and a rejected response, in adjacent rows.

Row 2i is the chosen response of pair i and row 2i + 1 the rejected one, as in NeMo-RL (TRL and
NeMo-Aligner have all chosen rows first). So a slice of an even number of rows holds whole pairs;
both rows of a pair go into the same micro-batch and carry the same ``sample_mask``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.errors import DataError
from aligner.types import Denominators


@dataclass(frozen=True)
class Pairs:
    """Pairs of a micro-batch that count, and means over those of the global batch.

    ``counts``: bool [B / 2]. ``total``: pairs of the global batch that count.
    """

    counts: Tensor
    total: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """This micro-batch's share of the mean of float [B / 2] over the global batch's pairs."""
        return torch.where(self.counts, values, 0).sum() / self.total

    def rows(self) -> Tensor:
        """bool [B], True where the row's pair counts."""
        return self.counts.repeat_interleave(2)


def pairs_of(batch: Mapping[str, Tensor], denominators: Denominators) -> Pairs:
    """The pairs of a micro-batch, by its float32 ``sample_mask`` [B]; both rows must count."""
    rows = batch["sample_mask"].shape[0]
    if rows % 2:
        raise DataError(
            f"a micro-batch of {rows} rows holds half a pair; chosen and rejected responses are "
            "adjacent rows, so make micro_batch_size even"
        )
    chosen, rejected = split_pairs(batch["sample_mask"].bool())
    return Pairs(chosen & rejected, denominators.valid_seqs / 2)


def split_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen and rejected rows of [B, ...], [B / 2, ...] each, of any dtype."""
    return rows[0::2], rows[1::2]


def reward_metrics(
    chosen: Tensor, rejected: Tensor, pairs: Pairs, tie: float = 0.0
) -> dict[str, Tensor]:
    """Means over pairs of float [B / 2]: both rewards, their margin, and how often it is positive.

    A margin up to ``tie`` is a tie, which is no success.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards_chosen": pairs.mean(chosen),
        "rewards_rejected": pairs.mean(rejected),
        "rewards_margin": pairs.mean(chosen - rejected),
        "accuracy": pairs.mean((chosen - rejected > tie).to(chosen.dtype)),
    }
