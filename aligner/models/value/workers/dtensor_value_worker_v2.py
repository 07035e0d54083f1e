"""One process's share of a critic on a transformers model, as FSDP2 and DTensors."""

from aligner.checkpoint.model_source import open_model
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.losses.value import RightShiftedLoss as _RightShiftLossWrapper
from aligner.losses.value import right_shift_values as _right_shift_values
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.value.workers.value_worker import ValueWorker
from aligner.parallel.groups import ParallelState

__all__ = ["DTensorValueWorkerV2", "_RightShiftLossWrapper", "_right_shift_values"]


class DTensorValueWorkerV2(ValueWorker[DTensorCriticModel]):
    """A critic of `Value` on this backend."""

    @staticmethod
    def load(
        settings: RoleSettings,
        body_path: str,
        whole_path: str | None,
        tokenizer: Tokenizer,
        parallel: ParallelState,
    ) -> DTensorCriticModel:
        """Load from a Hugging Face directory or a `.nemo`."""
        with open_model(whole_path or body_path) as source:
            return DTensorCriticModel(source, settings, parallel, tokenizer)

    def num_parameters(self) -> int:
        """Parameters of the whole role."""
        return self.model.num_parameters()
