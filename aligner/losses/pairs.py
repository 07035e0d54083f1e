"""Pairs of a chosen and a rejected response, in adjacent rows.

Row 2i is the chosen response of pair i and row 2i + 1 the rejected response, as in NeMo-RL. Both
rows of a pair are in the same micro-batch and have the same ``sample_mask``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.errors import DataError
from aligner.types import Denominators


@dataclass(frozen=True)
class Pairs:
    """Pairs of a micro-batch, with means over the unmasked pairs of the global batch.

    ``counts``: bool [B / 2], the pair is not masked. ``total``: unmasked pairs of the global batch,
    a scalar.
    """

    counts: Tensor
    total: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Return what float ``values`` [B / 2] add to their mean over the global batch."""
        return torch.where(self.counts, values, 0).sum() / self.total

    def rows(self) -> Tensor:
        """Return bool [B], True if the row's pair is not masked."""
        return self.counts.repeat_interleave(2)


def pairs_of(batch: Mapping[str, Tensor], denominators: Denominators) -> Pairs:
    """Return the pairs with ``sample_mask`` (float32 [B]) 1 in both rows.

    Raises DataError if the micro-batch has an odd number of rows.
    """
    rows = batch["sample_mask"].shape[0]
    if rows % 2:
        raise DataError(
            f"a micro-batch of {rows} rows splits a pair of chosen and rejected responses, which "
            "are adjacent rows. Make micro_batch_size even"
        )
    chosen, rejected = split_pairs(batch["sample_mask"].bool())
    return Pairs(chosen & rejected, denominators.valid_seqs / 2)


def split_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen rows and the rejected rows of [B, ...], each [B / 2, ...], any dtype."""
    return rows[0::2], rows[1::2]


def reward_metrics(
    chosen: Tensor, rejected: Tensor, pairs: Pairs, tie: float = 0.0
) -> dict[str, Tensor]:
    """Compute means over pairs of float [B / 2]: rewards, margin, share of positive margins.

    A margin up to ``tie`` does not count as positive.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards_chosen": pairs.mean(chosen),
        "rewards_rejected": pairs.mean(rejected),
        "rewards_margin": pairs.mean(chosen - rejected),
        "accuracy": pairs.mean((chosen - rejected > tie).to(chosen.dtype)),
    }
