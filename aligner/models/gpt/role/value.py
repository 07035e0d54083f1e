"""Critic on every backend: a scalar head in place of the output layer, and its values."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.forward.token_layout import TokenLayout
from aligner.models.gpt.role.model import RoleModel
from aligner.types import TokenOutputs


class ValueHead(nn.Module):
    """Linear map from a hidden state to ``outputs`` numbers, in ``dtype`` (float32) in any model.

    A critic has one, a reward model one for each attribute that it rates. PPO's value signal is
    small; in bfloat16 its updates fall below the precision of the weights. A fresh head is zero:
    every state is worth 0 until something has been learnt, on every layout.
    """

    def __init__(
        self, hidden_size: int, dtype: torch.dtype = torch.float32, outputs: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` in any dtype to ``[..., outputs]`` in the head's."""
        return F.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)


class ValueModel(RoleModel):
    """A role that estimates the values of states, with a scalar head for the output layer."""

    has_head = True
    # An output belongs to the next token. Only tests turn it off; no configuration reaches it.
    right_shift: ClassVar[bool] = True

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


def framed_outputs(numbers: Tensor, layout: TokenLayout, *, right_shift: bool) -> TokenOutputs:
    """Outputs float ``[n * L, K]`` of a `ValueHead` in the frame: ``[B, S]``, or ``[B, S, K]``.

    With ``right_shift`` the output of token j is the value of j + 1, the state *before* that token:
    otherwise the value of a state would be computed after its action was seen. Without it the
    output belongs to the token just read.
    """
    rows, tokens = layout.predicted_tokens() if right_shift else layout.all_tokens()
    numbers = numbers.squeeze(-1) if numbers.shape[-1] == 1 else numbers
    return TokenOutputs(layout.to_frame(layout.take(numbers, rows), tokens))
