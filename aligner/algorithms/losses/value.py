"""The published place of what is in `aligner.losses.value`."""

from aligner.losses.value import (
    MseValueLossConfig,
    MseValueLossFn,
    PPOValueLoss,
    RightShiftedLoss,
    right_shift_values,
)

__all__ = [
    "MseValueLossConfig",
    "MseValueLossFn",
    "PPOValueLoss",
    "RightShiftedLoss",
    "right_shift_values",
]
