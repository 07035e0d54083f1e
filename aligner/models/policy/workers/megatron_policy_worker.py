"""One process's share of a policy on megatron-core."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor

from aligner.checkpoint.gpt_weights import GatheredWeights
from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.tensors import HuggingFaceView
from aligner.config import RSModelConfig, TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt import load_from_nemo
from aligner.models.gpt.megatron.actor import MegatronGPTActorModel, MegatronGPTRSModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.policy.workers.policy_worker import PolicyWorker
from aligner.parallel.groups import ParallelState


class MegatronPolicyWorker(PolicyWorker[MegatronGPTActorModel]):
    """A policy of `Policy` on this backend."""

    @staticmethod
    def load(
        config: TrainedModelConfig,
        settings: RoleSettings,
        tokenizer: Tokenizer,
        parallel: ParallelState,
    ) -> MegatronGPTActorModel:
        """Load from a `.nemo`."""
        return load_from_nemo(
            MegatronGPTRSModel if isinstance(config, RSModelConfig) else MegatronGPTActorModel,
            settings,
            restore_path=config.restore_from_path,
            tokenizer=tokenizer,
        )

    # Weights for sampling engines -------------------------------------------------------------

    def hf_weight_names(self) -> Sequence[str]:
        """Names of all weights, as in a Hugging Face state dict, in depth order."""
        return list(self._hugging_face_view())

    def hf_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on every worker; collective over tensor, pipeline and expert parallel."""
        view = self._hugging_face_view()
        return ((name, view[name]) for name in names)

    def _hugging_face_view(self) -> HuggingFaceView:
        architecture = self.model.architecture
        family, _ = config_to_hf(architecture)
        return HuggingFaceView(self._gathered_weights, family.table, architecture)

    @cached_property
    def _gathered_weights(self) -> GatheredWeights:
        return GatheredWeights(
            self.model.gpt,
            self.model.architecture,
            tp_group=self.parallel.tp_group,
            pp_group=self.parallel.pp_group,
            ep_group=self.parallel.ep_group,
        )
