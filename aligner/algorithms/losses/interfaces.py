"""The published place of what is in `aligner.losses.interfaces`."""

from aligner.losses.interfaces import (
    LossFunction,
    LossInputType,
    PublishedLoss,
    as_loss,
    metric_tensor,
    reads_logits,
)

__all__ = [
    "LossFunction",
    "LossInputType",
    "PublishedLoss",
    "as_loss",
    "metric_tensor",
    "reads_logits",
]
