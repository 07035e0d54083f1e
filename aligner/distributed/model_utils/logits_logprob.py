"""Log-probs of selected tokens from logits whose vocabulary is sharded over tensor-parallel ranks.

In forward, each rank computes in float32, chunk by chunk, the logsumexp of its columns and the
logits of the selected tokens on this rank. These small tensors are then combined over ranks.
Backward recomputes the softmax without communication. With upstream gradients g_k::

    dl_v = Σ_k g_k · [v = index_k] - p_v · Σ_k g_k

Every rank returns the same log-probs. Gradients are exact if all ranks compute the same loss.
Logits are [B, S, V_local] (or [N, V_local]), with ``K`` selected tokens per position.
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
    """Options for log-probs: token ids of the local columns, chunk size, sampling options."""

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
        """Return a plan for logits whose columns are the token ids ``start`` to ``end - 1``."""
        shard = VocabShard.between(start, end, group)
        return cls(shard, chunk_size, sampling or TrainingSamplingParams())

    def chunk(self, logits: Tensor, rows: slice) -> Tensor:
        """Return positions ``rows`` of logits [..., V], divided by the temperature, not padded."""
        chunk = logits[..., rows, : self.shard.columns].to(arithmetic_dtype(logits))
        return chunk if self.sampling.temperature == 1.0 else chunk / self.sampling.temperature

    def thresholds(self, chunk: Tensor, width: int) -> Tensor | None:
        """Compute the smallest logit that top-k and top-p keep at each position, [..., n].

        ``chunk``: [..., n, columns], this rank's logits. Ranks exchange chunks, so all pad them to
        ``width`` columns. Returns None without top-k and top-p.
        """
        if not self.sampling.restricts:
            return None
        padded = chunk.new_full((*chunk.shape[:-1], width), -torch.inf)
        padded[..., : chunk.shape[-1]] = chunk
        limits = shard_thresholds(
            padded.flatten(0, -2), self.shard.group, self.sampling.kept_count, self.sampling.top_p
        )
        return limits.view(chunk.shape[:-1])

    def restrict(
        self, chunk: Tensor, limits: Tensor | None, local: Tensor, owned: Tensor
    ) -> Tensor:
        """Replace logits in ``chunk`` [..., n, columns] below ``limits`` [..., n] by -inf.

        With ``sampling.keep_target`` the logits of targets remain. ``local``: columns of the
        targets in this rank's logits, [..., n, K]. ``owned``: [..., n, K], whether the target is on
        this rank.
        """
        if limits is None or chunk.shape[-1] == 0:
            return chunk
        excluded = chunk < limits.unsqueeze(-1)
        if self.sampling.keep_target:
            excluded.scatter_(-1, local, excluded.gather(-1, local) & ~owned)
        return chunk.masked_fill(excluded, -torch.inf)


def logprob_forward(
    ctx: Any, logits: Tensor, indices: Tensor, plan: LogprobPlan, inference_only: bool
) -> Tensor:
    """Compute log-probs [..., S, K] of the token ids ``indices``, int64 [..., S, K]."""
    assert indices.shape[:-1] == logits.shape[:-1], (indices.shape, logits.shape)
    assert plan.shard.columns <= logits.shape[-1], (plan.shard, logits.shape)
    dtype = arithmetic_dtype(logits)
    local, owned = plan.shard.localize(indices)
    selected = logits.new_empty(indices.shape, dtype=dtype)
    partial = logits.new_empty(indices.shape[:-1], dtype=dtype)
    thresholds = torch.empty_like(partial) if plan.sampling.restricts else None
    for rows in sequence_chunks(logits, plan.chunk_size):
        # Logits of the chunk within the filter.
        chunk, columns = plan.chunk(logits, rows), (local[..., rows, :], owned[..., rows, :])
        limits = plan.thresholds(chunk, logits.shape[-1])
        if thresholds is not None:
            thresholds[..., rows] = limits
        chunk = plan.restrict(chunk, limits, *columns)
        # Reduce the chunk to selected logits and one partial normaliser per position.
        selected[..., rows, :] = select_owned(chunk, *columns)
        partial[..., rows] = chunk.logsumexp(dim=-1)
    # Combine the partial normalisers of all ranks.
    normalizer = plan.shard.stack_ranks(partial).logsumexp(dim=0)
    if not inference_only:
        ctx.save_for_backward(logits, indices, normalizer, thresholds)
        ctx.plan = plan
    return plan.shard.sum(selected).sub_(normalizer.unsqueeze(-1))


def select_owned(chunk: Tensor, local: Tensor, owned: Tensor) -> Tensor:
    """Gather columns ``local`` [..., K] of ``chunk`` [..., columns], or 0 if not ``owned``."""
    if chunk.shape[-1] == 0:  # this rank stores only padding
        return chunk.new_zeros(local.shape)
    return torch.where(owned, chunk.gather(-1, local), 0)


def target_logprobs(
    ctx: Any, logits: Tensor, target: Tensor, plan: LogprobPlan, inference_only: bool
) -> Tensor:
    """Compute log-probs [..., S] of the token ids ``target``, int64 [..., S]."""
    return logprob_forward(ctx, logits, target.unsqueeze(-1), plan, inference_only).squeeze(-1)


class _Logprobs(torch.autograd.Function):
    """Base class with the backward pass. Subclasses differ only in the arguments of ``forward``."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of this rank's logits. Top-k and top-p are treated as constant."""
        logits, indices, normalizer, thresholds = ctx.saved_tensors
        upstream = grad_outputs[0].view(indices.shape)
        plan: LogprobPlan = ctx.plan
        columns = plan.shard.columns
        local, owned = plan.shard.localize(indices)
        grad = torch.empty_like(logits)
        grad[..., columns:] = 0
        for rows in sequence_chunks(logits, plan.chunk_size):
            row_local, row_owned = local[..., rows, :], owned[..., rows, :]
            # Recompute the logits of the chunk.
            limits = None if thresholds is None else thresholds[..., rows]
            chunk = plan.restrict(plan.chunk(logits, rows), limits, row_local, row_owned)
            # Excluded targets get no gradient.
            grad_output = upstream[..., rows, :]
            is_excluded = select_owned(chunk, row_local, row_owned).isneginf()
            target_grad = torch.where(row_owned & ~is_excluded, grad_output, 0)
            # The softmax, scaled by the total gradient, plus the gradient at the targets.
            tile = (chunk - normalizer[..., rows].unsqueeze(-1)).exp_()
            tile.mul_(-grad_output.sum(dim=-1, keepdim=True))
            if columns:
                tile.scatter_add_(-1, row_local, target_grad.to(tile.dtype))
            grad[..., rows, :columns] = tile.div_(plan.sampling.temperature)
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class PlannedLogprob(_Logprobs):
    """Log-probs [..., S] of token ids [..., S] from logits [..., S, V_local], by a plan."""

    forward = staticmethod(target_logprobs)


class DistributedLogprob(_Logprobs):
    """Log-probs of one target per position, computed in chunks of positions to save memory."""

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
        """Compute the targets' log-probs, float32 [B, S] (float64 for float64 logits).

        ``vocab_parallel_logits``: float [B, S, V_local]. Its first columns are the token ids
        ``vocab_start_index`` to ``vocab_end_index - 1``, later columns are ignored padding.
        ``target``: int64 [B, S], the next token of each position. ``group``: ranks that share the
        vocabulary. ``inference_only``: save nothing for backward.
        """
        plan = LogprobPlan.between(vocab_start_index, vocab_end_index, group)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


class ChunkedDistributedLogprob(_Logprobs):
    """`DistributedLogprob` with ``chunk_size`` positions per step."""

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
        """Compute as `DistributedLogprob.forward`, ``chunk_size`` positions at a time."""
        plan = LogprobPlan.between(vocab_start_index, vocab_end_index, tp_group, chunk_size)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


class ChunkedDistributedGatherLogprob(_Logprobs):
    """Log-probs of K tokens per position."""

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
        """Compute log-probs, float32 [B, S, K], of token ids ``global_indices`` [B, S, K].

        For the other arguments see `DistributedLogprob.forward`.
        """
        plan = LogprobPlan.between(vocab_start_index, vocab_end_index, tp_group, chunk_size)
        return logprob_forward(ctx, vocab_parallel_logits, global_indices, plan, inference_only)


class DistributedLogprobWithSampling(_Logprobs):
    """Log-probs of one target per position, in the distribution after top-k and top-p.

    The softmax includes all columns. Logits of padding columns must be -inf.
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
        """Compute the targets' log-probs, float32 [B, S] (float64 for float64 logits).

        ``vocab_parallel_logits``: float [B, S, V_local]. Rank r of ``tp_group`` stores part r of
        the vocabulary. ``target``: int64 [B, S], the next token of each position. A target that
        top-k or top-p excludes has log-prob -inf. ``top_k`` (None, 0 or -1: off) is applied before
        ``top_p`` (1: off). Equal logits are kept or excluded together. Raises `ConfigError` for
        invalid ``top_k`` or ``top_p``.
        """
        plan = _sampling_plan(vocab_parallel_logits, tp_group, top_k, top_p, None)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


class ChunkedDistributedLogprobWithSampling(_Logprobs):
    """`DistributedLogprobWithSampling` with ``chunk_size`` positions per step."""

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
        """Compute in chunks. See `DistributedLogprobWithSampling.forward`."""
        plan = _sampling_plan(vocab_parallel_logits, tp_group, top_k, top_p, chunk_size)
        return target_logprobs(ctx, vocab_parallel_logits, target, plan, inference_only)


def _sampling_plan(
    logits: Tensor,
    group: dist.ProcessGroup | None,
    top_k: int | None,
    top_p: float,
    chunk_size: int | None,
) -> LogprobPlan:
    width = logits.shape[-1]
    start = 0 if group is None else width * dist.get_rank(group)
    sampling = TrainingSamplingParams(top_k=top_k, top_p=top_p)
    return LogprobPlan.between(start, start + width, group, chunk_size, sampling)
