"""The critic on a transformers model: a body with a scalar head in place of the output layer."""

from collections.abc import Mapping

from torch import Tensor

from aligner.models.gpt.dtensor import DTensorModel
from aligner.models.gpt.dtensor_model import TransformersModel
from aligner.models.gpt.pipeline import Microbatch, MicroBatches
from aligner.models.gpt.token_layout import TokenLayout
from aligner.types import TokenOutputs


def shifted_values(raw: Tensor, layout: TokenLayout) -> Tensor:
    """Values of the frame ``[B, S]`` from the head's output ``[n * L]`` on the rows of a layout.

    Shifted right: the output after reading token j is the value of the state before token j + 1.
    The reference documents report that this alone decides parity of the backends.
    """
    rows, tokens = layout.predicted_tokens()
    return layout.to_frame(raw[rows], tokens)


class DTensorCriticModel(DTensorModel):
    """PPO's critic, the twin of `MegatronGPTCriticModel`."""

    role_name = "critic"
    has_scalar_head = True

    def token_outputs(
        self,
        model: TransformersModel,
        hidden: Tensor,
        microbatch: Microbatch,
        with_entropy: bool,
    ) -> TokenOutputs:
        """The value before every token."""
        assert not with_entropy  # a policy's matter
        assert model.score is not None
        return TokenOutputs(shifted_values(model.score(hidden).squeeze(-1), microbatch.layout))

    def get_values(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Values of the states before each token; see `MegatronGPTCriticModel.get_values`."""
        return self.infer_tokens(batch, micro_batches)
