"""The scalar head of critics and reward models."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ValueHead(nn.Module):
    """Linear map from a hidden state to a scalar, kept in ``dtype`` (float32) in any model.

    PPO's value signal is small; in bfloat16 its updates fall below the precision of the weights.
    A fresh head is zero: every state is worth 0 until something has been learnt, on every layout.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` in any dtype to ``[..., 1]`` in the head's."""
        return F.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)
