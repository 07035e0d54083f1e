"""One process's share of a policy on a transformers model, as FSDP2 and DTensors."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from aligner.checkpoint.model_source import open_model
from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.policy.workers.policy_worker import PolicyWorker
from aligner.parallel.groups import ParallelState


class DTensorPolicyWorkerV2(PolicyWorker[DTensorActorModel]):
    """A policy of `Policy` on this backend."""

    @staticmethod
    def load(
        config: TrainedModelConfig,
        settings: RoleSettings,
        tokenizer: Tokenizer,
        parallel: ParallelState,
    ) -> DTensorActorModel:
        """Load from a Hugging Face directory or a `.nemo`."""
        with open_model(config.restore_from_path) as source:
            return DTensorActorModel(source, settings, parallel, tokenizer)

    def num_parameters(self) -> int:
        """Parameters of the whole role."""
        return self.model.num_parameters()

    def hf_weight_names(self) -> Sequence[str]:
        """Names of all weights, as in a Hugging Face state dict, in depth order."""
        return list(self.model.hugging_face_weights())

    def hf_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on every worker; collective over all of them."""
        weights = self.model.hugging_face_weights()
        return ((name, weights[name]) for name in names)
