"""Entropy and cross-entropy of distributions whose vocabulary is sharded over ranks.

Each rank sums over its columns. The sums are combined with each rank's share of the probability as
weight: forward exchanges [B, S] values once, backward none. The arithmetic is at least float32.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.model_utils.distributed_softmax import arithmetic_dtype
from aligner.errors import LayoutError
from aligner.logprobs.output_layer import VocabShard, sequence_chunks


class ChunkedDistributedEntropy(torch.autograd.Function):
    """Negative entropy ``Σ_v p_v log p_v`` of the softmax p of logits. Sign as in NeMo-RL."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        chunk_size: int,
        tp_group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Compute the negative entropy, float32 [B, S], ``chunk_size`` positions at a time.

        ``vocab_parallel_logits``: float [B, S, V_local]. A logit of -inf contributes 0.
        ``inference_only``: save nothing for backward.
        """
        logits = vocab_parallel_logits
        result, normalizer, _ = _mean_logprob(logits, logits, tp_group, chunk_size)
        if not inference_only:
            ctx.save_for_backward(logits, normalizer, result)
            ctx.chunk_size = chunk_size
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the logits' gradient, ``g · p_v · (log p_v - Σ p log p)``, given g [B, S]."""
        logits, normalizer, result = ctx.saved_tensors
        upstream, grad = grad_outputs[0].unsqueeze(-1), torch.empty_like(logits)
        for rows in sequence_chunks(logits, ctx.chunk_size):
            logprob = logits[..., rows, :] - normalizer[..., rows].unsqueeze(-1)
            probability = logprob.exp()
            logprob.sub_(result[..., rows].unsqueeze(-1)).mul_(probability)
            logprob.masked_fill_(probability == 0, 0)  # 0 · -inf
            grad[..., rows, :] = logprob.mul_(upstream[..., rows, :])
        return grad, None, None, None


class DistributedCrossEntropy(torch.autograd.Function):
    """Cross-entropy ``-Σ_v p_v log q_v`` of target p and student q."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        target_logits: Tensor,
        group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Compute the cross-entropy at each position, float32 [B, S].

        Both logits are float [B, S, V_local] with the same token ids and positions. The gradient
        flows to the student only. If only the student has a logit of -inf for a token, the result
        is infinite. Raises `LayoutError` if shapes differ.
        """
        if student_logits.shape != target_logits.shape:
            raise LayoutError(
                f"student_logits {list(student_logits.shape)} and target_logits "
                f"{list(target_logits.shape)} must have the same shape. Shard both over the same "
                "vocabulary ranges and positions"
            )
        mean, target_normalizer, student_normalizer = _mean_logprob(
            target_logits, student_logits, group, None
        )
        if not inference_only:
            ctx.save_for_backward(
                student_logits, target_logits, student_normalizer, target_normalizer
            )
        return -mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the student's logits, ``g · (q_v - p_v)``, given g [B, S]."""
        student, target, student_normalizer, target_normalizer = ctx.saved_tensors
        upstream, grad = grad_outputs[0].unsqueeze(-1), torch.empty_like(student)
        for rows in sequence_chunks(student, None):
            tile = (student[..., rows, :] - student_normalizer[..., rows].unsqueeze(-1)).exp_()
            tile.sub_((target[..., rows, :] - target_normalizer[..., rows].unsqueeze(-1)).exp_())
            grad[..., rows, :] = tile.mul_(upstream[..., rows, :])
        return grad, None, None, None


def _mean_logprob(
    p_logits: Tensor, q_logits: Tensor, group: dist.ProcessGroup | None, chunk_size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``Σ_v p_v log q_v``, and the logsumexp of p's and q's logits, each [B, S]."""
    shard = VocabShard.between(0, p_logits.shape[-1], group)
    dtype = torch.promote_types(arithmetic_dtype(q_logits), p_logits.dtype)
    logits = [p_logits] if p_logits is q_logits else [p_logits, q_logits]
    partial = p_logits.new_empty(len(logits) + 1, *p_logits.shape[:-1], dtype=dtype)
    # Softmax of this rank's columns: each distribution sums to 1 over these columns.
    for rows in sequence_chunks(p_logits, chunk_size):
        chunks = [tensor[..., rows, :].to(dtype) for tensor in logits]
        local = [chunk.logsumexp(dim=-1) for chunk in chunks]
        probability = (chunks[0] - local[0].unsqueeze(-1)).exp_()
        logprob = (chunks[-1] - _finite(local[-1]).unsqueeze(-1)).mul_(probability)
        mean = logprob.masked_fill_(probability == 0, 0).sum(dim=-1)
        for index, values in enumerate((*local, mean)):
            partial[index, ..., rows] = values
    # All ranks: a rank's share of p weights its mean, and its share of q is added to its log-probs.
    *normalizers, means = shard.stack_ranks(partial).unbind(1)
    totals = [normalizer.logsumexp(dim=0) for normalizer in normalizers]
    share = (normalizers[0] - totals[0]).exp_()
    means = (means + (_finite(normalizers[-1]) - totals[-1])).mul_(share)
    return means.masked_fill_(share == 0, 0).sum(dim=0), totals[0], totals[-1]


def _finite(normalizer: Tensor) -> Tensor:
    """Replace -inf by the smallest finite number. Otherwise -inf - (-inf) would be NaN."""
    return normalizer.clamp(min=torch.finfo(normalizer.dtype).min)
