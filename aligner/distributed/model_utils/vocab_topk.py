"""Selects raw logits from a sharded vocabulary: the largest, or those of given tokens."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.model_utils.context_shard import gather_context, scatter_context
from aligner.distributed.model_utils.distributed_softmax import arithmetic_dtype
from aligner.distributed.model_utils.logits_logprob import select_owned
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
    """Return the ``k`` largest logits of each position over the whole vocabulary. No gradient.

    ``vocab_parallel_logits``: as in `DistributedLogprob.forward`. ``chunk_size``: number of
    positions converted to float32 at a time. Every rank returns the logits, float32 [B, S, k] in
    descending order, and their token ids, int64 [B, S, k]. If there are fewer than ``k`` tokens,
    the remaining logits are -inf with token id 0.
    """
    logits = vocab_parallel_logits
    shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
    # Every rank provides `count` candidates. Candidates that are not filled stay (-inf, id 0).
    count = min(k, logits.shape[-1])
    values = logits.new_full(
        (*logits.shape[:-1], count), -torch.inf, dtype=arithmetic_dtype(logits)
    )
    ids = torch.zeros(values.shape, dtype=torch.int64, device=logits.device)
    # The largest logits of this rank, without columns of padding.
    filled = min(count, shard.columns)
    for positions in sequence_chunks(logits, chunk_size):
        chunk = logits[..., positions, : shard.columns].to(values.dtype)
        best = chunk.topk(filled, dim=-1)
        values[..., positions, :filled] = best.values
        ids[..., positions, :filled] = best.indices + shard.start
    # The largest of all ranks' candidates, [ranks, ..., count] -> [..., ranks * count].
    candidates = torch.cat(shard.stack_ranks(values).unbind(0), dim=-1)
    candidate_ids = torch.cat(shard.stack_ranks(ids).unbind(0), dim=-1)
    best = candidates.topk(min(k, candidates.shape[-1]), dim=-1)
    return best.values, candidate_ids.gather(-1, best.indices)


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
    """Return the logits of token ids ``global_indices`` [B, S, k], float32 [B, S, k].

    ``vocab_parallel_logits``: float [B, S_cp, V_local], as in `DistributedLogprob.forward`.
    ``cp_group``: ranks that share the sequence (`context_shard`). ``chunk_size``: number of
    positions per chunk in backward. Every rank returns all logits.
    """
    shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
    local = scatter_context(global_indices, vocab_parallel_logits.shape[1], cp_group)
    selected = _SelectedLogits.apply(vocab_parallel_logits, local, shard, chunk_size)
    return gather_context(selected, global_indices.shape[1], cp_group)


class _SelectedLogits(torch.autograd.Function):
    """Selects the logits of token ids [B, S, K] from logits [B, S, V_local], on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, indices: Tensor, shard: VocabShard, chunk_size: int | None
    ) -> Tensor:
        assert indices.shape[:-1] == logits.shape[:-1], (indices.shape, logits.shape)
        local, owned = shard.localize(indices)
        ctx.save_for_backward(local, owned)
        ctx.shape, ctx.dtype, ctx.chunk_size = logits.shape, logits.dtype, chunk_size
        selected = select_owned(logits[..., : shard.columns], local, owned)
        return shard.sum(selected.to(arithmetic_dtype(logits)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        local, owned = ctx.saved_tensors
        upstream = torch.where(owned, grad_outputs[0], 0)
        grad = upstream.new_empty(ctx.shape, dtype=ctx.dtype)
        for rows in sequence_chunks(grad, ctx.chunk_size):
            # In float32, so that repeated indices are summed before rounding.
            tile = upstream.new_zeros(grad[..., rows, :].shape)
            grad[..., rows, :] = tile.scatter_add_(-1, local[..., rows, :], upstream[..., rows, :])
        return grad, None, None, None
