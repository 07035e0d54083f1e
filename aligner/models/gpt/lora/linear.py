"""megatron-core's parallel linears with a low-rank adapter: ``y = W x + alpha / rank · B (A x)``.

How the two matrices are shared out over tensor-parallel ranks:

    column: A [rank, in] on all, B [out / tp, rank]    row: A [rank, in / tp], B [out, rank] on all

Between A and B there are ``rank`` numbers a token, and what ranks exchange is those. A matrix that
all ranks hold has the whole gradient on each; under sequence parallelism each has that of its
tokens, and the ``sequence_parallel`` mark has megatron-core add them up.

The names of the linear's own parameters stay, so that checkpoints fit with and without adapters.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from aligner.checkpoint.adapters import add_product
from aligner.config import LoraConfig
from aligner.kernels.parallel_linear import ColumnLinear, RowLinear
from aligner.models.gpt.lora.dropout import TokenDropout


class Adapter(nn.Module):
    """The two matrices of one linear, or this rank's share of them; they are 0 until filled."""

    def __init__(self, inputs: int, outputs: int, lora: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(lora.adapter_dim, inputs, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(outputs, lora.adapter_dim, dtype=dtype))
        self.scale = lora.scale
        self.enabled = True
        self.dropout: TokenDropout | None = None  # in training
        self.stream = 0  # of the dropout's draws

    def down(self, hidden: Tensor, *, part: int = 0, parts: int = 1, first: int = 0) -> Tensor:
        """``scale · A x`` ``[..., rank]``; see `TokenDropout` for what is shared out."""
        if self.training and self.dropout is not None:
            hidden = self.dropout(hidden, self.stream, part=part, parts=parts, first=first)
        return F.linear(hidden, self.a) * self.scale

    def up(self, low: Tensor) -> Tensor:
        """``B x`` of ``[..., rank]``."""
        return F.linear(low, self.b)

    @torch.no_grad()
    def merged_into(self, weight: Tensor) -> Tensor:
        """Weight [out, in] of a plain linear that computes the same, from ``weight`` [out, in]."""
        return add_product(weight, self.a, self.b, self.scale)


class AdaptedLinear(nn.Module):
    """Mixin before a parallel linear: its output plus the adapter's."""

    lora: Adapter

    def forward(
        self, input_: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, in]`` to ``[s, b, out]``, of which ranks hold what the linear's have."""
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self.adapted(input_) if self.lora.enabled else output, bias

    def adapted(self, hidden: Tensor) -> Tensor:
        """The adapter's part of the output, shared out as in `forward`.

        ``hidden``: ``[s, b, in]``; returns ``[s, b, out]``.
        """
        raise NotImplementedError


class LoraColumnParallelLinear(AdaptedLinear, ColumnLinear):
    """A linear whose outputs are shared out, with an `Adapter`."""

    def __init__(self, *args: object, lora: LoraConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert not self.gather_output
        assert not self.explicit_expert_comm
        shape = self.input_size, self.output_size_per_partition
        self.lora = Adapter(*shape, lora, self.config.params_dtype)
        self.lora.a.sequence_parallel = self.sequence_parallel
        set_tensor_model_parallel_attributes(self.lora.b, True, 0, 1)

    def adapted(self, hidden: Tensor) -> Tensor:
        """``[s, b, in]`` to ``[s, b, out / tp]``; s is shared out under sequence parallelism."""
        group = self.tp_group
        if self.sequence_parallel:
            low = self.lora.down(hidden, part=group.rank(), parts=group.size())
            low = gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=group
            )
        else:
            low = copy_to_tensor_model_parallel_region(self.lora.down(hidden), group=group)
        return self.lora.up(low)


class LoraRowParallelLinear(AdaptedLinear, RowLinear):
    """A linear whose inputs are shared out, with an `Adapter`."""

    def __init__(self, *args: object, lora: LoraConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert self.input_is_parallel
        assert not self.explicit_expert_comm
        shape = self.input_size_per_partition, self.output_size
        self.lora = Adapter(*shape, lora, self.config.params_dtype)
        self.lora.b.sequence_parallel = self.sequence_parallel
        set_tensor_model_parallel_attributes(self.lora.a, True, 1, 1)

    def adapted(self, hidden: Tensor) -> Tensor:
        """``[s, b, in / tp]`` to ``[s, b, out]``; s is shared out under sequence parallelism."""
        group = self.tp_group
        low = self.lora.down(hidden, first=group.rank() * hidden.shape[-1])
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=group)
        return self.lora.up(low)
