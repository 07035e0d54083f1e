"""Raw logits out of a vocabulary spread over ranks: the largest, and those of given tokens."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.model_utils.context_shard import gather_context, scatter_context
from aligner.distributed.model_utils.distributed_softmax import arithmetic_dtype
from aligner.distributed.model_utils.logits_logprob import take_owned
from aligner.logprobs.output_layer import VocabShard, sequence_chunks


@torch.no_grad()
def distributed_vocab_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    tp_group: dist.ProcessGroup,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits of each position, over the whole vocabulary; no gradient.

    ``vocab_parallel_logits``: float [B, S, V_local], whose first ``vocab_end_index -
    vocab_start_index`` columns are those global ids (the rest is padding and never chosen while
    ``k`` real tokens are left). ``k`` is cut to the number of columns of all ranks. ``chunk_size``:
    positions whose float32 form exists at a time; None lets memory decide.

    Returns ``(values float32 [B, S, k] in descending order, global ids int64 [B, S, k])``, the same
    on every rank.
    """
    logits = vocab_parallel_logits
    shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
    width = logits.shape[-1]
    count = min(k, width)
    values = logits.new_full(
        (*logits.shape[:-1], count), -torch.inf, dtype=arithmetic_dtype(logits)
    )
    ids = torch.zeros(values.shape, dtype=torch.int64, device=logits.device)
    found = min(count, shard.columns)
    for rows in sequence_chunks(logits, chunk_size):
        chunk = logits[..., rows, : shard.columns].to(values.dtype)
        best = chunk.topk(found, dim=-1)
        values[..., rows, :found], ids[..., rows, :found] = best.values, best.indices + shard.start
    candidates, candidate_ids = _side_by_side(values, shard), _side_by_side(ids, shard)
    best = candidates.topk(min(k, candidates.shape[-1]), dim=-1)
    return best.values, candidate_ids.gather(-1, best.indices)


def _side_by_side(local: Tensor, shard: VocabShard) -> Tensor:
    """[..., n] of every rank → [..., ranks * n]."""
    return torch.cat(shard.stack_ranks(local).unbind(0), dim=-1)


def gather_logits_at_global_indices(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> Tensor:
    """Logits at ``global_indices`` int64 [B, S, k], float32 [B, S, k] on every rank.

    ``vocab_parallel_logits``: float [B, S_cp, V_local], whose first ``vocab_end_index -
    vocab_start_index`` columns are those global ids. With ``cp_group`` they are this rank's chunks
    of the sequence (`aligner.distributed.model_utils.context_shard`), which may have been padded.
    Without ``tp_group`` they are the whole vocabulary. ``chunk_size``: positions at a time in the
    gradient.

    Differentiable in the logits; repeated indices add up.
    """
    shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
    local = scatter_context(global_indices, vocab_parallel_logits.shape[1], cp_group)
    chosen = _ChosenLogits.apply(vocab_parallel_logits, local, shard, chunk_size)
    return gather_context(chosen, global_indices.shape[1], cp_group)


class _ChosenLogits(torch.autograd.Function):
    """float [B, S, V_local], int64 [B, S, K] → [B, S, K]; each rank owns some."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, indices: Tensor, shard: VocabShard, chunk_size: int | None
    ) -> Tensor:
        assert indices.shape[:-1] == logits.shape[:-1], (indices.shape, logits.shape)
        local, owned = shard.localize(indices)
        ctx.save_for_backward(local, owned)
        ctx.shape, ctx.dtype, ctx.chunk_size = logits.shape, logits.dtype, chunk_size
        chosen = take_owned(logits[..., : shard.columns], local, owned)
        return shard.sum(chosen.to(arithmetic_dtype(logits)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        local, owned = ctx.saved_tensors
        given = torch.where(owned, grad_outputs[0], 0)
        grad = given.new_empty(ctx.shape, dtype=ctx.dtype)
        for rows in sequence_chunks(grad, ctx.chunk_size):
            # In float32: repeated indices add up before they are rounded.
            tile = given.new_zeros(grad[..., rows, :].shape)
            grad[..., rows, :] = tile.scatter_add_(-1, local[..., rows, :], given[..., rows, :])
        return grad, None, None, None
