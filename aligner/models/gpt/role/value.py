"""Critic on any backend: values from a scalar head in place of the output layer."""

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
    """Linear map from a hidden state to ``outputs`` values, in float32 in models of any dtype.

    The updates from PPO's small value signal would be below the precision of bfloat16 weights. A
    new head is zero, so that on every layout all initial values are 0.
    """

    def __init__(
        self, hidden_size: int, dtype: torch.dtype = torch.float32, outputs: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[..., H]`` of any dtype to ``[..., outputs]`` in the head's dtype."""
        return F.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)


class ValueModel(RoleModel):
    """A role that estimates the values of states with a scalar head."""

    # An output belongs to the next token. Only tests disable it, not configurations.
    right_shift: ClassVar[bool] = True

    @property
    def head_outputs(self) -> int:
        """Number of the head's outputs for a token."""
        return 1

    def get_values(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Compute the value of the state before each token, float32 ``[B, S]``.

        Values are 0 beyond a sequence's length. ``batch``: ``input_ids`` int64 ``[B, S]`` and
        ``input_lengths`` int64 ``[B]``. ``micro_batches``: see `RoleModel.infer_tokens`.
        """
        return self.infer_tokens(batch, micro_batches)


def framed_outputs(outputs: Tensor, layout: TokenLayout, *, right_shift: bool) -> TokenOutputs:
    """Map `ValueHead` outputs float ``[n * L, K]`` to the frame: ``[B, S]``, or ``[B, S, K]``.

    With ``right_shift`` the output at token j is the value of j + 1, of the state *before* that
    token. Otherwise the value of a state would be computed after its action is known.
    """
    rows, tokens = layout.predicted_tokens() if right_shift else layout.all_tokens()
    outputs = outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
    return TokenOutputs(layout.to_frame(layout.take(outputs, rows), tokens))
