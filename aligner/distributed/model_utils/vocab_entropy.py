"""Entropy and cross-entropy of distributions whose vocabulary is spread over ranks.

Both are sums over the vocabulary weighted with probabilities. Each rank sums under its own softmax,
and the parts are combined with each rank's share of the probability: one exchange of [B, S] numbers
forward, none backward. float32 (float64 for float64 logits), chunk by chunk over the sequence.
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
    """``Σ_v p_v log p_v`` (at most 0: the entropy without its minus, as published)."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        chunk_size: int,
        tp_group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """float [B, S, V_local] → float32 [B, S]; ``chunk_size`` positions at a time.

        A column of -inf counts 0. ``inference_only``: keep nothing for backward.
        """
        logits = vocab_parallel_logits
        shard = VocabShard.between(0, logits.shape[-1], tp_group)
        dtype = arithmetic_dtype(logits)
        partial = logits.new_empty(2, *logits.shape[:-1], dtype=dtype)
        for rows in sequence_chunks(logits, chunk_size):
            chunk = logits[..., rows, :].to(dtype)
            partial[0, ..., rows] = chunk.logsumexp(dim=-1)
            partial[1, ..., rows] = _mean_logprob(
                chunk, partial[0, ..., rows], chunk, partial[0, ..., rows]
            )
        normalizers, means = shard.stack_ranks(partial).unbind(1)
        normalizer = normalizers.logsumexp(dim=0)
        result = _combine(normalizers, normalizer, means, normalizers, normalizer)
        if not inference_only:
            ctx.save_for_backward(logits, normalizer, result)
            ctx.chunk_size = chunk_size
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """``dl_v = g · p_v · (log p_v - Σ p log p)``, float [B, S, V_local] of g [B, S]."""
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
    """``-Σ_v p_v log q_v`` of target p and student q: forward KL plus the entropy of p."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        target_logits: Tensor,
        group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """float [B, S, V_local] of both, sharded alike → float32 [B, S].

        Only the student gets a gradient. Infinite where the student excludes (-inf) what the target
        does not. ``inference_only``: keep nothing for backward.

        Raises:
            LayoutError: the two shapes differ.
        """
        if student_logits.shape != target_logits.shape:
            raise LayoutError(
                f"student_logits {list(student_logits.shape)} and target_logits "
                f"{list(target_logits.shape)} must have the same shape: shard both over the same "
                "vocabulary ranges and positions"
            )
        shard = VocabShard.between(0, student_logits.shape[-1], group)
        dtype = torch.promote_types(arithmetic_dtype(student_logits), target_logits.dtype)
        partial = student_logits.new_empty(3, *student_logits.shape[:-1], dtype=dtype)
        for rows in sequence_chunks(student_logits, None):
            student = student_logits[..., rows, :].to(dtype)
            target = target_logits[..., rows, :].to(dtype)
            partial[0, ..., rows] = student.logsumexp(dim=-1)
            partial[1, ..., rows] = target.logsumexp(dim=-1)
            partial[2, ..., rows] = _mean_logprob(
                target, partial[1, ..., rows], student, partial[0, ..., rows]
            )
        students, targets, means = shard.stack_ranks(partial).unbind(1)
        student_normalizer, target_normalizer = students.logsumexp(dim=0), targets.logsumexp(dim=0)
        if not inference_only:
            ctx.save_for_backward(
                student_logits, target_logits, student_normalizer, target_normalizer
            )
        return -_combine(targets, target_normalizer, means, students, student_normalizer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """``dl_v = g · (q_v - p_v)`` for the student, float [B, S, V_local] of g [B, S]."""
        student, target, student_normalizer, target_normalizer = ctx.saved_tensors
        upstream, grad = grad_outputs[0].unsqueeze(-1), torch.empty_like(student)
        for rows in sequence_chunks(student, None):
            tile = (student[..., rows, :] - student_normalizer[..., rows].unsqueeze(-1)).exp_()
            tile.sub_((target[..., rows, :] - target_normalizer[..., rows].unsqueeze(-1)).exp_())
            grad[..., rows, :] = tile.mul_(upstream[..., rows, :])
        return grad, None, None, None


def _mean_logprob(p: Tensor, p_normalizer: Tensor, q: Tensor, q_normalizer: Tensor) -> Tensor:
    """``Σ_v p_v log q_v`` of the local columns, each distribution adding up to 1 over them.

    ``p``, ``q``: logits [..., n, V_local]. What p excludes counts 0.
    """
    probability = (p - p_normalizer.unsqueeze(-1)).exp_()
    logprob = q - _finite(q_normalizer).unsqueeze(-1)
    return logprob.mul_(probability).masked_fill_(probability == 0, 0).sum(dim=-1)


def _combine(
    p_partial: Tensor, p_whole: Tensor, means: Tensor, q_partial: Tensor, q_whole: Tensor
) -> Tensor:
    """``Σ_v p_v log q_v`` over all ranks, [ranks, ...] → [...], from what each made of its own.

    A rank's share of p weighs its mean, and its share of q is added to each of its log-probs.
    """
    share = (p_partial - p_whole).exp_()
    whole = means + (_finite(q_partial) - q_whole)
    return whole.mul_(share).masked_fill_(share == 0, 0).sum(dim=0)


def _finite(normalizer: Tensor) -> Tensor:
    """Replace a normaliser of -inf by the smallest number, so that -inf minus it stays -inf."""
    return normalizer.clamp(min=torch.finfo(normalizer.dtype).min)
