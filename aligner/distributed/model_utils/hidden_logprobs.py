"""Next-token log-probs from megatron-core's hidden states, without the full logits in memory.

A context-parallel rank stores ``S_cp = S / CP`` positions, with sequence parallelism ``S_cp / TP``.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.distributed.model_utils.context_shard import (
    gather_context,
    packed_targets,
    scatter_context,
    unpack,
)
from aligner.errors import LayoutError
from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams
from aligner.parallel.collectives import SumGradient


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
    """Compute log-probs of ``target[:, 1:]`` from hidden states, a few tokens at a time.

    The result is float32 [B, S-1], or [n, unpacked_seqlen - 1] for n packed sequences. Gradients
    are exact if all tensor-parallel ranks compute the same loss. Backward sums gradients over
    context-parallel ranks.

    Args:
        tensor_parallel_hidden_states: float [S_cp / TP, B, H] with ``sequence_parallel``, else
            [S_cp, B, H], equal on all tensor-parallel ranks.
        output_weight_layer: float [V_local, H], the output layer's weight.
        output_weight: weight to use instead, such as the tied embedding.
        runtime_gather_output: ignored.
        target: int64 [B, S], not shifted, complete on every rank, or packed tokens [1, T].
        vocab_start_index: token id of the weight's first row.
        vocab_end_index: end of this rank's token ids (exclusive). Later rows are padding.
        tp_group: ranks that share the vocabulary.
        inference_only: save nothing for backward.
        cp_group: ranks that share the sequence (`context_shard`).
        chunk_size: maximum number of tokens whose logits are in memory.
        sampling_params: temperature, top-k and top-p of the distribution.
        cu_seqlens_padded: integers [n + 1], start of each packed sequence and end of the last.
        unpacked_seqlen: for packed sequences, the number of columns of the result plus one.
        sequence_parallel: whether hidden states are sharded over ``tp_group``.
    """
    del runtime_gather_output  # logits are not materialised
    weight = output_weight if output_weight is not None else output_weight_layer
    if weight is None:
        raise LayoutError(
            "no weight is given. Pass output_weight_layer, or output_weight for a tied embedding"
        )
    if (cu_seqlens_padded is None) != (unpacked_seqlen is None):
        raise LayoutError("packed sequences need both cu_seqlens_padded and unpacked_seqlen")
    shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        # All positions on every rank. In backward, the ranks' gradients are summed.
        hidden, length = tensor_parallel_hidden_states, tensor_parallel_hidden_states.shape[0]
        if shard.group is not None and not sequence_parallel:
            hidden = SumGradient.apply(hidden, shard.group)
        elif shard.group is not None:
            length *= dist.get_world_size(shard.group)
        batch = hidden.shape[1]
        # The token that each local position predicts.
        target = target.to(hidden.device)
        if cu_seqlens_padded is not None:
            local = packed_targets(target[0], cu_seqlens_padded, cp_group).unsqueeze(0)
        else:
            local = scatter_context(target.roll(-1, dims=-1), length, cp_group)
        assert local.shape == (batch, length), (local.shape, hidden.shape)
        logprobs, _ = hidden_states_to_logprobs(
            hidden.flatten(0, 1),
            weight,
            local.t().reshape(-1),
            shard,
            sampling_params or TrainingSamplingParams(),
            gather_group=shard.group if sequence_parallel else None,
            chunk_size=chunk_size,
        )
        if cu_seqlens_padded is not None and unpacked_seqlen is not None:
            return unpack(logprobs, cu_seqlens_padded, unpacked_seqlen, cp_group)
        rows = logprobs.view(length, batch).t()
        return gather_context(rows, target.shape[1], cp_group)[:, :-1]


class ChunkedDistributedHiddenStatesToLogprobs:
    """Computes log-probs of targets from hidden states, without storing logits [B, S, V]."""

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
        """Compute the log-probs of the targets, float32 [B, S].

        ``ctx`` is ignored. ``tensor_parallel_hidden_states``: float [S / TP, B, H], sharded by
        sequence parallelism. ``target``: int64 [B, S], the next token of each position. For the
        other arguments see `from_parallel_hidden_states_to_logprobs`.
        """
        del ctx
        shard = VocabShard.between(vocab_start_index, vocab_end_index, tp_group)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            logprobs, _ = hidden_states_to_logprobs(
                tensor_parallel_hidden_states.flatten(0, 1),
                output_weight_layer,
                target.t().reshape(-1),
                shard,
                TrainingSamplingParams(),
                gather_group=shard.group,
                chunk_size=chunk_size,
            )
        return logprobs.view(target.shape[::-1]).t()

    apply = partial(forward, None)
