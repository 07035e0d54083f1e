"""Aggregation of the losses of single tokens into the loss of a batch.

==================  ================================================================================
``token_mean``      Σ over tokens / valid tokens of the global batch. Every token weighs the same
                    (DAPO, Yu et al., 2025; the default of verl and NeMo-RL)
``sequence_mean``   Σ over sequences of (mean over their tokens) / valid sequences. Every sequence
                    weighs the same, tokens of long ones less (GRPO, Shao et al., 2024; GSPO)
``fixed_length``    Σ over tokens / (valid sequences · longest response allowed). Every token weighs
                    the same in every batch (Dr. GRPO, Liu et al., 2025; verl divides by the padded
                    width by default, TRL by the length allowed, as here)
==================  ================================================================================

A sequence counts when its ``sample_mask`` is 1 (NeMo-RL; verl and OpenRLHF count those with a
token, TRL all). One without a generated token is to have ``sample_mask`` 0.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from aligner.errors import ConfigError
from aligner.losses.masked import masked_mean, masked_sum
from aligner.types import Denominators

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


@dataclass(frozen=True)
class BatchAverage:
    """This micro-batch's share of an average over the global batch.

    ``mask``: bool [B, S], True where the token was generated and its sample counts.
    ``max_response_length``: most tokens a response may have; only ``fixed_length`` needs it.
    """

    mask: Tensor
    denominators: Denominators
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Scalar share for float [B, S]; masked positions may hold anything."""
        if self.aggregation == "token_mean":
            return masked_mean(values, self.mask, self.denominators.valid_tokens)
        if self.aggregation == "sequence_mean":
            return row_means(values, self.mask).sum() / self.denominators.valid_seqs
        assert self.max_response_length is not None
        per_token = masked_mean(values, self.mask, self.denominators.valid_seqs)
        return per_token / self.max_response_length


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row of float [B, S] over its unmasked positions, float [B]; 0 without any."""
    return masked_sum(values, mask, dim=1) / mask.sum(1).clamp(min=1)


def check_aggregation(aggregation: str, max_response_length: int | None) -> None:
    """Refuse an unknown aggregation, and a length that is missing or has no effect."""
    known = get_args(Aggregation)
    if aggregation not in known:
        raise ConfigError(f"aggregation={aggregation!r} is unknown; use one of {', '.join(known)}")
    if aggregation == "fixed_length":
        if max_response_length is None or max_response_length < 1:
            raise ConfigError(
                f"aggregation=fixed_length needs max_response_length of at least 1, got "
                f"{max_response_length}; give the most tokens a response may have"
            )
    elif max_response_length is not None:
        raise ConfigError(
            f"max_response_length={max_response_length} says nothing with aggregation="
            f"{aggregation}; leave it out, or use aggregation=fixed_length"
        )
