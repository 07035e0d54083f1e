"""The critic: a GPT body with a scalar head in place of the output layer."""

from collections.abc import Mapping

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.models.gpt.hidden_states import OutputLayerBypass, full_hidden_states
from aligner.models.gpt.megatron import MegatronGPTModel
from aligner.models.gpt.pipeline import Microbatch
from aligner.models.gpt.value_head import ValueHead, right_shift
from aligner.models.interfaces import CriticModelInterface
from aligner.types import TokenOutputs


class MegatronGPTCriticModel(MegatronGPTModel, CriticModelInterface):
    """PPO's critic.

    The output layer is removed for good, so no ``[S, B, V]`` logits exist at any time. The head is
    a parameter of the megatron-core model itself: one optimizer, one schedule and one gradient norm
    for body and head.
    """

    def add_head(self, gpt: GPTModel) -> None:
        """Replace the output layer by `ValueHead` on the last pipeline stage."""
        if gpt.post_process:
            gpt.output_layer = OutputLayerBypass()
            gpt.rm_head = ValueHead(self.architecture.hidden_size)

    def token_outputs(
        self, gpt: GPTModel, hidden: Tensor, batch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Right-shifted values of every position; ``with_entropy`` is a policy's matter."""
        assert not with_entropy
        raw = gpt.rm_head(full_hidden_states(gpt, hidden, vocab_parallel=False)).squeeze(-1)
        return TokenOutputs(right_shift(raw))

    def get_values(
        self, batch: Mapping[str, Tensor], micro_batch_size: int | None = None
    ) -> Tensor:
        """Values of the states before each token.

        Args:
            batch: ``input_ids`` int64 ``[B, S]`` and ``input_lengths`` int64 ``[B]``.
            micro_batch_size: sequences per forward pass; default ``forward_micro_batch_size``.

        Returns:
            float32 ``[B, S]``; positions beyond a sequence's length mean nothing.
        """
        return self.infer_tokens(batch, micro_batch_size)

    def infer(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Same as `get_values`."""
        return self.get_values(batch)

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values under ``values``; rewards join them where a reward model shares the body."""
        return {"values": self.get_values(batch)}
