"""The critic: a GPT body with a scalar head in place of the output layer."""

from collections.abc import Mapping

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.models.gpt.hidden_states import OutputLayerBypass, full_hidden_states
from aligner.models.gpt.megatron import MegatronGPTModel
from aligner.models.gpt.pipeline import Microbatch, MicroBatches
from aligner.models.gpt.value_head import ValueHead
from aligner.models.interfaces import CriticModelInterface
from aligner.types import TokenOutputs


class MegatronGPTCriticModel(MegatronGPTModel, CriticModelInterface):
    """PPO's critic.

    The output layer is removed for good, so no ``[S, B, V]`` logits exist at any time. The head is
    a parameter of the megatron-core model itself: one optimizer, one schedule and one gradient norm
    for body and head.
    """

    role_name = "critic"

    def add_head(self, gpt: GPTModel) -> None:
        """Replace the output layer by `ValueHead` on the last pipeline stage."""
        gpt.share_embeddings_and_output_weights = False  # nothing is left to share them with
        if gpt.post_process:
            gpt.output_layer = OutputLayerBypass()
            gpt.rm_head = ValueHead(self.architecture.hidden_size)

    def token_outputs(
        self, gpt: GPTModel, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """The value before every token: what was read up to token j is the value of j + 1.

        Without this shift the value of a state would be computed after its action was seen.
        """
        assert not with_entropy  # a policy's matter
        rows, tokens = microbatch.layout.predicted_tokens()
        return TokenOutputs(microbatch.layout.to_frame(head_output(gpt, hidden)[rows], tokens))

    def get_values(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Values of the states before each token.

        Args:
            batch: ``input_ids`` int64 ``[B, S]`` and ``input_lengths`` int64 ``[B]``.
            micro_batches: sequences per forward pass, or the rows of each; default
                ``forward_micro_batch_size``.

        Returns:
            float32 ``[B, S]``; 0 beyond a sequence's length.
        """
        return self.infer_tokens(batch, micro_batches)

    def infer(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Same as `get_values`."""
        return self.get_values(batch)

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values under ``values``; rewards join them where a reward model shares the body."""
        return {"values": self.get_values(batch)}


def head_output(gpt: GPTModel, hidden: Tensor) -> Tensor:
    """What the scalar head makes of hidden states ``[n, L, H]``: ``[n * L]``."""
    return gpt.rm_head(full_hidden_states(gpt, hidden, vocab_parallel=False)).squeeze(-1)
