"""Softmax and log-softmax of logits whose vocabulary is sharded over tensor-parallel ranks.

The arithmetic is in float32 (float64 for float64 logits), chunk by chunk along the sequence.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.logprobs.output_layer import VocabShard, sequence_chunks


def arithmetic_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype for computing with logits [..., V]: float64 for float64, else float32."""
    return torch.promote_types(logits.dtype, torch.float32)


def _compute_distributed_log_softmax(
    vocab_parallel_logits: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Compute the log-softmax of this rank's columns, [B, S, V_local] in the logits' dtype."""
    shard = VocabShard.between(0, vocab_parallel_logits.shape[-1], group)
    return _DistributedSoftmax.apply(vocab_parallel_logits, shard, True)


def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Compute the softmax of this rank's columns, [B, S, V_local] in the dtype of the logits."""
    shard = VocabShard.between(0, vocab_parallel_logits.shape[-1], group)
    return _DistributedSoftmax.apply(vocab_parallel_logits, shard, False)


class _DistributedSoftmax(torch.autograd.Function):
    """Log-softmax ``y = l - log Σ exp(l)``, or softmax ``p = exp(y)``, of logits l.

    Given the gradient g of the output, the gradient of l is ``g - p · Σ_v g_v`` for y, and ``p · (g
    - Σ_v p_v g_v)`` for p.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard, as_logarithm: bool) -> Tensor:
        # The normaliser of this rank's columns, then of the vocabulary.
        local = logits.new_empty(logits.shape[:-1], dtype=arithmetic_dtype(logits))
        for rows in sequence_chunks(logits, None):
            local[..., rows] = logits[..., rows, :].to(local.dtype).logsumexp(dim=-1)
        normalizer = shard.stack_ranks(local).logsumexp(dim=0)
        ctx.save_for_backward(logits, normalizer)
        ctx.shard, ctx.as_logarithm = shard, as_logarithm
        # The normalised values.
        output = torch.empty_like(logits)
        for rows in sequence_chunks(logits, None):
            shifted = logits[..., rows, :] - normalizer[..., rows].unsqueeze(-1)
            output[..., rows, :] = shifted if as_logarithm else shifted.exp_()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, normalizer = ctx.saved_tensors
        upstream, total = grad_outputs[0], torch.empty_like(normalizer)

        def probabilities(rows: slice) -> Tensor:
            return (logits[..., rows, :] - normalizer[..., rows].unsqueeze(-1)).exp_()

        # Sum over the vocabulary, which the gradient of each logit contains.
        if ctx.as_logarithm:
            total = upstream.sum(dim=-1, dtype=normalizer.dtype)
        else:
            for rows in sequence_chunks(logits, None):
                total[..., rows] = probabilities(rows).mul_(upstream[..., rows, :]).sum(dim=-1)
        total = ctx.shard.sum(total).unsqueeze(-1)
        # Gradient of the local logits, chunk by chunk.
        grad = torch.empty_like(logits)
        for rows in sequence_chunks(logits, None):
            probability, grad_output = probabilities(rows), upstream[..., rows, :]
            if ctx.as_logarithm:
                grad[..., rows, :] = grad_output - probability.mul_(total[..., rows, :])
            else:
                grad[..., rows, :] = probability.mul_(grad_output - total[..., rows, :])
        return grad, None, None
