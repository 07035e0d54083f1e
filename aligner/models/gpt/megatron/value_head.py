"""The head of critics and reward models."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
