"""megatron-core's parallel linears, multiplying on CPU with `linear_product`."""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from aligner.kernels.linear_product import linear_product


class _Multiplying(nn.Module):
    """Mixin before a parallel linear: the products that it computes."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, **arguments: Any
    ) -> Tensor:
        """``[s, b, in]`` to ``[s, b, out]``, of this rank's part of the weight."""
        exchanges = arguments["sequence_parallel"] or arguments["allreduce_dgrad"]
        if exchanges or input.device.type != "cpu" or weight.dtype != torch.float32:
            return super()._forward_impl(input, weight, bias=bias, **arguments)
        output = linear_product(input, weight)
        return output if bias is None else output + bias


class ColumnLinear(_Multiplying, ColumnParallelLinear):
    """A linear whose outputs are shared out."""


class RowLinear(_Multiplying, RowParallelLinear):
    """A linear whose inputs are shared out."""
