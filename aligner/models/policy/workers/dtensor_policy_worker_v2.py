"""One process's share of a policy on a transformers model, as FSDP2 and DTensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.checkpoint.model_source import open_model
from aligner.config import Drawing, TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed import accelerator
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt.decode.scheduler import TokenListener
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.policy.workers.policy_worker import PolicyWorker


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

    def generate(
        self,
        data: Mapping[str, Any],
        greedy: bool = False,
        *,
        seed: int | None = None,
        drawing: Drawing | None = None,
        listener: TokenListener | None = None,
    ) -> BatchedDataDict:
        """Continue right-padded prompts; see `GenerationOutputSpec`."""
        if self.model.is_ready_to_generate:
            return super().generate(data, greedy, seed=seed, drawing=drawing, listener=listener)
        self.prepare_for_generation()
        try:
            return super().generate(data, greedy, seed=seed, drawing=drawing, listener=listener)
        finally:
            self.finish_generation()

    def prepare_for_generation(self) -> None:
        """Gather the weights as they are now into the model that generates."""
        self.bring_back()
        self.model.prepare_for_generation()

    def finish_generation(self) -> None:
        """Give up the model that generates; with ``offload_weights`` all leaves the device."""
        self.model.finish_generation()
        self._park()
        accelerator.release_memory()

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
