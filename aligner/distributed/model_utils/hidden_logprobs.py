"""Next-token log-probs straight from megatron-core's hidden states, logits never in memory.

Shape legend: ``H`` hidden, ``T`` packed tokens; ``S_cp = S / CP`` positions on a context-parallel
rank, of which sequence parallelism leaves ``S_cp / TP`` on each tensor-parallel rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.model_utils.context_shard import gather_context, scatter_context
from aligner.distributed.model_utils.packed_frame import packed_targets, unpack
from aligner.errors import LayoutError
from aligner.logprobs.fused import (
    RowStatistics,
    input_gradients,
    row_statistics,
    shard_logprobs,
)
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams
from aligner.parallel.collectives import SumGradient, gather_first, reduce_scatter_first


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor | None,
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    *,
    sampling_params: TrainingSamplingParams | None = None,
    cu_seqlens_padded: Tensor | None = None,
    unpacked_seqlen: int | None = None,
    sequence_parallel: bool = True,
) -> Tensor:
    """Log-probs of ``target[:, 1:]``, float32 [B, S-1]; packed: [n, unpacked_seqlen - 1].

    The same numbers as `from_parallel_logits_to_logprobs` (packed: `…_packed_sequences`) gives for
    the logits, in the memory of a tile of them.

    Args:
        tensor_parallel_hidden_states: float [S_cp / TP, B, H], as sequence parallelism leaves them,
            or [S_cp, B, H], the same on all tensor-parallel ranks, without ``sequence_parallel``.
        output_weight_layer: float [V_local, H], the output layer's own weight, whose first
            ``vocab_end_index - vocab_start_index`` rows are those global ids.
        output_weight: used instead where it is given: the embedding's, when tied.
        runtime_gather_output: as megatron-core has it; log-probs are whole on every rank anyway.
        target: int64 [B, S], unshifted and whole on every rank; packed [1, T].
        vocab_start_index: first global id of the local weight.
        vocab_end_index: behind the last.
        tp_group: spreads the vocabulary (and the sequence).
        inference_only: keep nothing for backward.
        cp_group: spreads the sequence, in the chunks of `context_shard`.
        chunk_size: most tokens at a time; None lets the memory of a tile decide.
        sampling_params: the distribution that was sampled from, temperature included.
        cu_seqlens_padded: integers [n + 1], boundaries of packed sequences in [T] (B is 1).
        unpacked_seqlen: length of the rows that packed sequences are put into.
        sequence_parallel: whether the hidden states are sharded over ``tp_group``.

    The gradients of hidden states and weight are exact for a loss that the tensor-parallel ranks
    compute alike, and summed over the context-parallel ranks (`AllGatherCPTensor`).

    Raises:
        LayoutError: no weight, or ``cu_seqlens_padded`` without ``unpacked_seqlen``.
    """
    del runtime_gather_output  # there are no logits to gather
    weight = output_weight if output_weight is not None else output_weight_layer
    if weight is None:
        raise LayoutError(
            "no weight: pass output_weight_layer, or output_weight where it is the embedding's"
        )
    if (cu_seqlens_padded is None) != (unpacked_seqlen is None):
        raise LayoutError("packed sequences need both cu_seqlens_padded and unpacked_seqlen")
    shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        hidden = tensor_parallel_hidden_states
        if shard.group is not None:  # what ranks make of it adds up in the gradient
            whole = gather_first if sequence_parallel else SumGradient.apply
            hidden = whole(hidden, shard.group)
        length, batch, _ = hidden.shape
        target = target.to(hidden.device)
        if cu_seqlens_padded is not None:
            local = packed_targets(target[0], cu_seqlens_padded, cp_group).unsqueeze(0)
        else:
            local = scatter_context(target.roll(-1, dims=-1), length, cp_group)
        assert local.shape == (batch, length), (local.shape, hidden.shape)
        logprobs, _ = shard_logprobs(
            hidden.flatten(0, 1),
            weight,
            local.t().reshape(-1),
            shard,
            sampling_params or TrainingSamplingParams(),
            chunk_size=chunk_size,
        )
        if cu_seqlens_padded is not None and unpacked_seqlen is not None:
            return unpack(logprobs, cu_seqlens_padded, unpacked_seqlen, cp_group)
        rows = logprobs.view(length, batch).t()
        return gather_context(rows, target.shape[1], cp_group)[:, :-1]


class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    """Log-probs of targets from hidden states, [B, S, V] never in memory.

    Only the local part of the hidden states is kept for backward, where they are gathered again.
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
        hidden = gather_first(tensor_parallel_hidden_states, tp_group)
        sequence, batch, _ = hidden.shape
        assert target.shape == (batch, sequence), (target.shape, hidden.shape)
        shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
        flat_target = target.t().reshape(-1)
        statistics = row_statistics(
            hidden.flatten(0, 1), output_weight_layer, flat_target, shard, chunk_size=chunk_size
        )
        if not inference_only:
            ctx.save_for_backward(
                tensor_parallel_hidden_states,
                output_weight_layer,
                flat_target,
                statistics.logprobs,
                statistics.log_normalizer,
            )
            ctx.shard, ctx.chunk_size = shard, chunk_size
        return statistics.logprobs.view(sequence, batch).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the local hidden states and weight, from the log-probs', float32 [B, S].

        That of the hidden states, [S / TP, B, H], is reduce-scattered; that of the weight is
        [V_local, H].
        """
        local_hidden, weight, target, logprobs, log_normalizer = ctx.saved_tensors
        hidden = gather_first(local_hidden, ctx.shard.group)
        grad_hidden, grad_weight = input_gradients(
            hidden.flatten(0, 1),
            weight,
            target,
            ctx.shard,
            RowStatistics(logprobs, log_normalizer, None),
            grad_outputs[0].t().reshape(-1),
            needed=(ctx.needs_input_grad[0], ctx.needs_input_grad[2]),
            chunk_size=ctx.chunk_size,
        )
        if grad_hidden is not None:
            grad_hidden = reduce_scatter_first(grad_hidden.view_as(hidden), ctx.shard.group)
        return grad_hidden, None, grad_weight, None, None, None, None, None
