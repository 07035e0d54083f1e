"""Critic and reward model on a transformers model, with a head in place of the output layer."""

from torch import Tensor

from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.forward.schedule import Microbatch
from aligner.models.gpt.forward.token_layout import framed_outputs
from aligner.models.gpt.role.model import ValueModel
from aligner.models.gpt.role.reward import RewardRole
from aligner.types import TokenOutputs


class DTensorCriticModel(DTensorModel, ValueModel):
    """PPO's critic, the counterpart of `MegatronGPTCriticModel`."""

    role_name = "critic"

    def token_outputs(
        self, model: TransformersModel, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Compute values before every token, float32 [B, S], from ``hidden`` [n * L, H]."""
        assert not with_entropy  # only a policy has an entropy
        assert model.score is not None
        return framed_outputs(model.score(hidden), microbatch.layout, right_shift=self.right_shift)


class DTensorRewardModel(RewardRole, DTensorCriticModel):
    """Reward model, the counterpart of `MegatronGPTRewardModel`."""
