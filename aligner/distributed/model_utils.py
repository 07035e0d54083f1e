"""Vocabulary-parallel log-probs, under their published names.

Functions here keep the published frame: targets are already shifted, or come out as [B, S-1].
Groups are explicit arguments and devices those of the tensors.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.fused_logprob import (
    RowStatistics,
    hidden_states_to_logprobs,
    input_gradients,
    logit_gradient,
    row_statistics,
)
from aligner.distributed.vocab_shard import VocabShard

__all__ = ["ChunkedDistributedHiddenStatesToLogprobs", "hidden_states_to_logprobs"]


class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    """Log-probs of targets from hidden states, [B, S, V] never in memory.

    The published form for megatron-core's layout; `hidden_states_to_logprobs` is the same
    arithmetic on flat tokens, with temperature, kept sets and entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor_parallel_hidden_states: Tensor,
        target: Tensor,
        output_weight_layer: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: dist.ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Log-probs float32 [B, S].

        ``tensor_parallel_hidden_states``: float [S / TP, B, H], sharded over the sequence as
        sequence parallelism leaves them. ``target``: int64 [B, S], already shifted, global ids.
        ``output_weight_layer``: float [V_local, H], whose first ``vocab_end_index -
        vocab_start_index`` rows are those global ids (the rest is padding). ``chunk_size``: most
        tokens at a time. ``inference_only``: keep nothing for backward.
        """
        hidden = _gather_sequence(tensor_parallel_hidden_states, tp_group)
        sequence, batch, _ = hidden.shape
        assert target.shape == (batch, sequence), (target.shape, hidden.shape)
        shard = VocabShard(vocab_start_index, vocab_end_index - vocab_start_index, tp_group)
        flat_target = target.t().reshape(-1)
        statistics = row_statistics(
            hidden.flatten(0, 1), output_weight_layer, flat_target, shard, chunk_size=chunk_size
        )
        if not inference_only:
            # The local part only: the whole sequence is gathered again in backward.
            ctx.save_for_backward(
                tensor_parallel_hidden_states,
                output_weight_layer,
                flat_target,
                statistics.logprobs,
                statistics.log_normalizer,
            )
            ctx.shard, ctx.chunk_size, ctx.tp_group = shard, chunk_size, tp_group
        return statistics.logprobs.view(sequence, batch).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the local hidden states (reduce-scattered) and of the local weight."""
        local_hidden, weight, target, logprobs, log_normalizer = ctx.saved_tensors
        hidden = _gather_sequence(local_hidden, ctx.tp_group)
        gradient = logit_gradient(
            RowStatistics(logprobs, log_normalizer, None),
            target,
            ctx.shard,
            grad_outputs[0].t().reshape(-1),
            None,
            restricted=False,
        )
        grad_hidden, grad_weight = input_gradients(
            hidden.flatten(0, 1),
            weight,
            ctx.shard,
            gradient,
            thresholds=None,
            chunk_size=ctx.chunk_size,
            need_hidden=ctx.needs_input_grad[0],
            need_weight=ctx.needs_input_grad[2],
        )
        if grad_hidden is not None:
            grad_hidden = _scatter_sequence(grad_hidden.view_as(hidden), ctx.tp_group)
        return grad_hidden, None, grad_weight, None, None, None, None, None


def _gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S / TP, ...] of every rank one after the other: [S, ...]."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return local
    whole = local.new_empty(local.shape[0] * ranks, *local.shape[1:])
    dist.all_gather(list(whole.chunk(ranks)), local.contiguous(), group=group)
    return whole


def _scatter_sequence(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [S, ...] over the ranks and keep this rank's [S / TP, ...]."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return whole
    local = whole.new_empty(whole.shape[0] // ranks, *whole.shape[1:])
    dist.reduce_scatter(local, list(whole.contiguous().chunk(ranks)), group=group)
    return local
