"""Experts of a layer by one grouped matrix product each way, instead of one per expert.

The experts' weights stay parameters of their own, as megatron-core's `SequentialMLP` has them:
checkpoints, optimizer and run states do not see a difference. They are joined for a product and
joined again for its gradient, so that one layer's copy is alive at a time.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aligner.distributed import accelerator
from aligner.logprobs.output_layer import weight_is_read

_MULTIPLE = 8  # of the columns of bf16 matrices: rows begin at multiples of 16 bytes


class _GroupedLinear(torch.autograd.Function):
    """Rows ``[n, in]`` sorted by expert, times its weight ``[out, in]``: ``[n, out]``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ends: Tensor, counts: list[int], *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        ctx.counts = counts
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[3:]):
            joined = F.grouped_mm(grad.t(), rows, offs=ends)
            for expert, count in enumerate(ctx.counts):
                if count == 0:  # a product of nothing is left unwritten
                    joined[expert].zero_()
            grad_weights = list(joined.unbind())
        return (grad_rows, None, None, *grad_weights)


class GroupedExperts(SequentialMLP):
    """`SequentialMLP` in two grouped products, whatever the number of experts."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Rows ``[n, H]`` sorted by expert, their weights ``[n]``, and how many each has ``[E]``.

        Returns ``[n, H]`` and no bias.
        """
        experts, one = self.local_experts, self.local_experts[0]
        # Where a linear communicates by itself, its product is not all of it.
        alone = one.linear_fc1.explicit_expert_comm or self.tp_group.size() == 1
        if len(experts) == 1 or not alone or not permuted_local_hidden_states.shape[0]:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        ends = ends.to(permuted_local_hidden_states.device, non_blocking=True)

        def grouped(linears: list[nn.Module]) -> Any:
            def product(rows: Tensor) -> tuple[Tensor, None]:
                weights = [weight_is_read(linear) for linear in linears]
                return _GroupedLinear.apply(rows, ends, counts, *weights), None

            return product

        mlp = SimpleNamespace(
            config=one.config,
            activation_func=one.activation_func,
            linear_fc1=grouped([expert.linear_fc1 for expert in experts]),
            linear_fc2=grouped([expert.linear_fc2 for expert in experts]),
        )
        return MLP.forward(mlp, permuted_local_hidden_states, permuted_probs)


def can_group(config: TransformerConfig) -> bool:
    """Return whether there is a kernel for these experts: bf16 on a GPU, without biases."""
    widths = (config.hidden_size, config.moe_ffn_hidden_size or 0)
    return (
        accelerator.has_gpu()
        and config.params_dtype == torch.bfloat16
        and config.fp8 is None
        and not config.add_bias_linear
        and not config.moe_apply_probs_on_input
        and all(width % _MULTIPLE == 0 for width in widths)
    )
