"""Critic and reward model: a transformers model whose output layer is replaced by a head."""

from torch import Tensor

from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.forward.schedule import Microbatch
from aligner.models.gpt.forward.token_layout import framed_outputs
from aligner.models.gpt.role.model import ValueModel
from aligner.models.gpt.role.reward import RewardRole
from aligner.types import TokenOutputs


class DTensorCriticModel(DTensorModel, ValueModel):
    """Critic on a sharded transformers model. With megatron-core: `MegatronGPTCriticModel`."""

    role_name = "critic"

    def token_outputs(
        self, model: TransformersModel, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Compute the head's output per token, float32 [B, S], from hidden states [n * L, H]."""
        assert not with_entropy  # only a policy has an entropy
        assert model.score is not None
        return framed_outputs(model.score(hidden), microbatch.layout, right_shift=self.right_shift)


class DTensorRewardModel(RewardRole, DTensorCriticModel):
    """Reward model on a transformers model. With megatron-core: `MegatronGPTRewardModel`."""
