"""The critic on a transformers model: a body with a scalar head in place of the output layer."""

from typing import ClassVar

from torch import Tensor

from aligner.models.gpt.dtensor.model import DTensorModel
from aligner.models.gpt.dtensor.module import TransformersModel
from aligner.models.gpt.forward.schedule import Microbatch
from aligner.models.gpt.role.model import ValueModel
from aligner.types import TokenOutputs


class DTensorCriticModel(DTensorModel, ValueModel):
    """PPO's critic, the counterpart of `MegatronGPTCriticModel`."""

    role_name = "critic"
    has_scalar_head = True
    # Only tests turn it off, to see what it is for; no configuration reaches it.
    shifts_values: ClassVar[bool] = True

    def token_outputs(
        self,
        model: TransformersModel,
        hidden: Tensor,
        microbatch: Microbatch,
        with_entropy: bool,
    ) -> TokenOutputs:
        """Values before every token, float32 [B, S], of ``hidden`` [n * L, H].

        The output of token j is the value of token j + 1: without this shift the value of a state
        would be computed after its action was seen.
        """
        assert not with_entropy  # a policy's matter
        assert model.score is not None
        layout = microbatch.layout
        rows, tokens = layout.predicted_tokens() if self.shifts_values else layout.held_tokens()
        return TokenOutputs(
            layout.to_frame(layout.take(model.score(hidden).squeeze(-1), rows), tokens)
        )
