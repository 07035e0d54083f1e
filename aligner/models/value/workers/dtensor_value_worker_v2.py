"""One process's share of a critic on a transformers model, as FSDP2 and DTensors."""

from aligner.losses.value import RightShiftedLoss as _RightShiftLossWrapper
from aligner.losses.value import right_shift_values as _right_shift_values
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.value.workers.value_worker import ValueWorker

__all__ = ["DTensorValueWorkerV2", "_RightShiftLossWrapper", "_right_shift_values"]


class DTensorValueWorkerV2(ValueWorker[DTensorCriticModel]):
    """Worker of `Value` on this backend."""

    model_class = DTensorCriticModel
