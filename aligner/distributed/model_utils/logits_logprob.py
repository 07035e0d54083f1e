"""Log-probs of chosen tokens from logits whose vocabulary is spread over tensor-parallel ranks.

One arithmetic for all published forms. Forward: each rank reduces its columns, chunk by chunk over
the sequence and in float32, to one partial normaliser per position and to the chosen logits it
owns; these small tensors are combined over the ranks once. Backward: the softmax is computed again
from the logits (which are kept, not copied) and the saved normaliser, without communication::

    dl_v = Σ_k g_k · [v = index_k] - p_v · Σ_k g_k

Every rank returns the same values and gets the gradient of its own columns, for a loss that every
rank computes alike.

Shape legend: logits [B, S, V_local] (or [N, V_local]), ``K`` chosen tokens per position.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.model_utils.distributed_softmax import arithmetic_dtype
from aligner.logprobs.output_layer import VocabShard, sequence_chunks
from aligner.logprobs.top_k_top_p import TrainingSamplingParams, shard_thresholds


@dataclass(frozen=True)
class LogprobPlan:
    """Plan of computing log-probs: over which columns, of which distribution, in which steps."""

    shard: VocabShard
    chunk_size: int | None
    sampling: TrainingSamplingParams

    @classmethod
    def between(
        cls,
        start: int,
        end: int,
        group: dist.ProcessGroup | None,
        chunk_size: int | None = None,
        sampling: TrainingSamplingParams | None = None,
    ) -> "LogprobPlan":
        """The plan over the global ids from ``start`` up to ``end``, default without a filter."""
        shard = VocabShard.between(start, end, group)
        return cls(shard, chunk_size, sampling or TrainingSamplingParams())

    def chunk(self, logits: Tensor, rows: slice) -> Tensor:
        """Real columns [..., n, columns] of the positions ``rows`` of ``logits`` [..., S, V_local].

        They are in the dtype of the arithmetic, divided by the temperature.
        """
        chunk = logits[..., rows, : self.shard.columns].to(arithmetic_dtype(logits))
        return chunk if self.sampling.temperature == 1.0 else chunk / self.sampling.temperature

    def thresholds(self, chunk: Tensor, width: int) -> Tensor | None:
        """Smallest logit kept at each position of ``chunk``; None: keep all.

        ``chunk``: float [..., n, columns]. A collective: chunks are padded to ``width``, the number
        of columns every rank holds.
        """
        if not self.sampling.restricts:
            return None
        whole = chunk.new_full((*chunk.shape[:-1], width), -torch.inf)
        whole[..., : chunk.shape[-1]] = chunk
        limits = shard_thresholds(
            whole.flatten(0, -2), self.shard.group, self.sampling.kept_count, self.sampling.top_p
        )
        return limits.view(chunk.shape[:-1])

    def restrict(
        self, chunk: Tensor, limits: Tensor | None, local: Tensor, owned: Tensor
    ) -> Tensor:
        """``chunk`` [..., n, columns] with -inf below ``limits`` [..., n].

        The chosen tokens, columns ``local`` int64 [..., n, K] where ``owned`` bool [..., n, K],
        stay where the plan counts them as kept.
        """
        if limits is None or chunk.shape[-1] == 0:
            return chunk
        left_out = chunk < limits.unsqueeze(-1)
        if self.sampling.keep_target:
            left_out.scatter_(-1, local, left_out.gather(-1, local) & ~owned)
        return chunk.masked_fill(left_out, -torch.inf)


def logprob_forward(
    ctx: Any, logits: Tensor, indices: Tensor, plan: LogprobPlan, inference_only: bool
) -> Tensor:
    """Log-probs [..., S, K] of the global ids ``indices`` int64 [..., S, K]."""
    assert indices.shape[:-1] == logits.shape[:-1], (indices.shape, logits.shape)
    assert plan.shard.columns <= logits.shape[-1], (plan.shard, logits.shape)
    dtype = arithmetic_dtype(logits)
    local, owned = plan.shard.localize(indices)
    chosen = logits.new_empty(indices.shape, dtype=dtype)
    partial = logits.new_empty(indices.shape[:-1], dtype=dtype)
    thresholds = torch.empty_like(partial) if plan.sampling.restricts else None
    for rows in sequence_chunks(logits, plan.chunk_size):
        chunk, here = plan.chunk(logits, rows), (local[..., rows, :], owned[..., rows, :])
        limits = plan.thresholds(chunk, logits.shape[-1])
        if thresholds is not None:
            thresholds[..., rows] = limits
        chunk = plan.restrict(chunk, limits, *here)
        chosen[..., rows, :] = take_owned(chunk, *here)
        partial[..., rows] = chunk.logsumexp(dim=-1)
    normalizer = plan.shard.stack_ranks(partial).logsumexp(dim=0)
    if not inference_only:
        ctx.save_for_backward(logits, indices, normalizer, thresholds)
        ctx.plan = plan
    return plan.shard.sum(chosen).sub_(normalizer.unsqueeze(-1))


def take_owned(chunk: Tensor, local: Tensor, owned: Tensor) -> Tensor:
    """``chunk`` at ``local`` where it is owned, else 0: float [..., K].

    ``chunk``: float [..., columns]; ``local``: int64 [..., K]; ``owned``: bool [..., K].
    """
    if chunk.shape[-1] == 0:  # this rank holds padding only
        return chunk.new_zeros(local.shape)
    return torch.where(owned, chunk.gather(-1, local), 0)


def target_logprobs(
    ctx: Any, logits: Tensor, target: Tensor, plan: LogprobPlan, inference_only: bool
) -> Tensor:
    """`logprob_forward` of one token per position: ``target`` int64 [..., S] to [..., S]."""
    return logprob_forward(ctx, logits, target.unsqueeze(-1), plan, inference_only).squeeze(-1)


class _Logprobs(torch.autograd.Function):
    """Base of the published classes, whose forward passes differ in their arguments only."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the local logits, float [B, S, V_local], from the log-probs' [B, S(, K)].

        With top-k or top-p it is exact for a fixed set of kept tokens and 0 outside it.
        """
        logits, indices, normalizer, thresholds = ctx.saved_tensors
        upstream = grad_outputs[0].view(indices.shape)
        plan: LogprobPlan = ctx.plan
        columns = plan.shard.columns
        local, owned = plan.shard.localize(indices)
        grad = torch.empty_like(logits)
        grad[..., columns:] = 0
        for rows in sequence_chunks(logits, plan.chunk_size):
            here = (local[..., rows, :], owned[..., rows, :])
            limits = None if thresholds is None else thresholds[..., rows]
            chunk = plan.restrict(plan.chunk(logits, rows), limits, *here)
            given = upstream[..., rows, :]
            added = torch.where(here[1] & ~take_owned(chunk, *here).isneginf(), given, 0)
            tile = (chunk - normalizer[..., rows].unsqueeze(-1)).exp_()
            tile.mul_(-given.sum(dim=-1, keepdim=True))
            if columns:
                tile.scatter_add_(-1, here[0], added.to(tile.dtype))
            grad[..., rows, :columns] = tile.div_(plan.sampling.temperature)
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class PlannedLogprob(_Logprobs):
    """`target_logprobs` with any plan, for the functions of this package."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, plan: LogprobPlan, inference_only: bool
    ) -> Tensor:
        """float [..., S, V_local], int64 [..., S] → [..., S]."""
        return target_logprobs(ctx, logits, target, plan, inference_only)


class DistributedLogprob(_Logprobs):
    """Log-probs of targets; working memory is bounded, the chunk chosen by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Log-probs float32 [B, S] (float64 for float64 logits).

        ``vocab_parallel_logits``: float [B, S, V_local], whose first ``vocab_end_index -
        vocab_start_index`` columns are those global ids (the rest is padding and takes no part).
        ``target``: int64 [B, S], already shifted. ``inference_only``: keep nothing for backward.
        """
        plan = LogprobPlan.between(vocab_start_index, vocab_end_index, group)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


class ChunkedDistributedLogprob(_Logprobs):
    """`DistributedLogprob` with the number of positions per step given."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """As `DistributedLogprob.forward`; ``chunk_size`` positions of the sequence at a time."""
        plan = LogprobPlan.between(vocab_start_index, vocab_end_index, tp_group, chunk_size)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


class ChunkedDistributedGatherLogprob(_Logprobs):
    """Log-probs of K tokens per position, one log-softmax for all."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Log-probs float32 [B, S, K] of ``global_indices`` int64 [B, S, K], repeats allowed.

        The other arguments as for `ChunkedDistributedLogprob`.
        """
        plan = LogprobPlan.between(vocab_start_index, vocab_end_index, tp_group, chunk_size)
        return logprob_forward(ctx, vocab_parallel_logits, global_indices, plan, inference_only)


class DistributedLogprobWithSampling(_Logprobs):
    """Log-probs of the distribution that top-k and top-p leave; the chunk chosen by itself.

    Each rank sorts the whole rows of its share of the positions; only one limit per position
    returns, so the softmax and its gradient stay sharded over the vocabulary. The number of
    positions need not be a multiple of the tensor-parallel size. All columns count: padding must
    be -inf.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: dist.ProcessGroup,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        """Log-probs float32 [B, S] (float64 for float64 logits).

        ``vocab_parallel_logits``: float [B, S, V_local], rank r holding the r-th part of the
        vocabulary. ``target``: int64 [B, S], already shifted, global ids; -inf where it is outside
        the filter. ``top_k`` (None, 0 or -1: off), then ``top_p`` (1: off) over what it leaves;
        equal logits are kept or left out together. ``inference_only``: keep nothing for backward.

        Raises:
            ConfigError: ``top_k`` below -1 or ``top_p`` outside (0, 1].
        """
        plan = _sampling_plan(vocab_parallel_logits, tp_group, top_k, top_p, None)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


class ChunkedDistributedLogprobWithSampling(_Logprobs):
    """`DistributedLogprobWithSampling` with the number of positions per step given."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: dist.ProcessGroup,
        top_k: int | None,
        top_p: float,
        chunk_size: int,
        inference_only: bool = False,
    ) -> Tensor:
        """As `DistributedLogprobWithSampling.forward`; ``chunk_size`` positions at a time."""
        plan = _sampling_plan(vocab_parallel_logits, tp_group, top_k, top_p, chunk_size)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


def _sampling_plan(
    logits: Tensor,
    group: dist.ProcessGroup | None,
    top_k: int | None,
    top_p: float,
    chunk_size: int | None,
) -> LogprobPlan:
    """Plan over logits [B, S, V_local] of which rank r of ``group`` holds the r-th part."""
    width = logits.shape[-1]
    start = 0 if group is None else width * dist.get_rank(group)
    sampling = TrainingSamplingParams(top_k=top_k, top_p=top_p)
    return LogprobPlan.between(start, start + width, group, chunk_size, sampling)
