"""Pairs of a chosen and a rejected response, in adjacent rows.

Row 2i is the chosen response of pair i and row 2i + 1 the rejected response, as in NeMo-RL. Both
rows of a pair are in the same micro-batch. A pair is excluded if ``sample_mask`` is 0 in a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.errors import DataError
from aligner.types import Denominators


@dataclass(frozen=True)
class Pairs:
    """Mask of a micro-batch's preference pairs, for means over the pairs of the global batch.

    ``mask``: bool [B / 2], False for excluded pairs. ``total``: number of pairs in the global batch
    that are not excluded, a scalar.
    """

    mask: Tensor
    total: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Return this micro-batch's part of a mean over pairs. ``values``: float [B / 2]."""
        return torch.where(self.mask, values, 0).sum() / self.total

    def rows(self) -> Tensor:
        """Return the mask of rows, bool [B]. Both rows of a pair have the pair's value."""
        return self.mask.repeat_interleave(2)


def pairs_of(batch: Mapping[str, Tensor], denominators: Denominators) -> Pairs:
    """Return a micro-batch's pairs. A pair is excluded unless both rows have ``sample_mask`` 1.

    ``batch`` contains ``sample_mask``, float32 [B]. Raises DataError if B is odd.
    """
    rows = batch["sample_mask"].shape[0]
    if rows % 2:
        raise DataError(
            f"a micro-batch of {rows} rows splits a pair. The chosen and the rejected response are "
            "adjacent rows. Set micro_batch_size to an even number"
        )
    chosen, rejected = split_pairs(batch["sample_mask"].bool())
    return Pairs(chosen & rejected, denominators.valid_seqs / 2)


def split_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``rows`` [B, ...] into chosen rows 0, 2, ... and rejected rows, [B / 2, ...] each."""
    return rows[0::2], rows[1::2]


def reward_metrics(
    chosen: Tensor, rejected: Tensor, pairs: Pairs, tie: float = 0.0
) -> dict[str, Tensor]:
    """Compute ``rewards_chosen``, ``rewards_rejected``, ``rewards_margin`` and ``accuracy``.

    Results are means over pairs, scalars. ``chosen``, ``rejected``: rewards, float [B / 2]. The
    margin is their difference. ``accuracy`` is the share of pairs with a margin above ``tie``.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards_chosen": pairs.mean(chosen),
        "rewards_rejected": pairs.mean(rejected),
        "rewards_margin": pairs.mean(chosen - rejected),
        "accuracy": pairs.mean((chosen - rejected > tie).to(chosen.dtype)),
    }
