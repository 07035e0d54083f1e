"""Next-token log-probs [B, S-1] in the published convention, from logits in any layout."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from aligner.distributed.model_utils.context_shard import (
    gather_context,
    packed_targets,
    scatter_context,
    unpack,
)
from aligner.distributed.model_utils.dtensor_logprobs import (
    get_logprobs_from_vocab_parallel_logits,
    local_shard,
)
from aligner.distributed.model_utils.logits_logprob import LogprobPlan, PlannedLogprob
from aligner.logprobs.top_k_top_p import TrainingSamplingParams


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """Compute log-probs of ``target[:, 1:]``, float32 [B, S-1] (float64 for float64 logits).

    ``vocab_parallel_logits``: float [B, S / CP, V_local], padded beyond S if needed. The first
    ``vocab_end_index - vocab_start_index`` columns are these global ids, others are padding outside
    the softmax. ``target``: int64 [B, S], unshifted, complete on every rank. ``chunk_size``:
    positions per step. None derives it from memory. ``sampling_params``: the sampler's
    distribution, temperature included. ``inference_only``: save nothing for backward.

    Every rank returns all rows. The gradient is exact if all tensor-parallel ranks compute the same
    loss, and is summed over the context-parallel ranks (`AllGatherCPTensor`).
    """
    plan = LogprobPlan.between(
        vocab_start_index, vocab_end_index, tp_group, chunk_size, sampling_params
    )
    shifted = target.to(vocab_parallel_logits.device).roll(-1, dims=-1)
    local = scatter_context(shifted, vocab_parallel_logits.shape[1], cp_group)
    logprobs = PlannedLogprob.apply(vocab_parallel_logits, local, plan, inference_only)
    return gather_context(logprobs, target.shape[1], cp_group)[:, :-1]


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    target_is_pre_rolled: bool = False,
) -> Tensor:
    """Compute log-probs of packed sequences, unpacked to float32 [n, unpacked_seqlen - 1].

    ``vocab_parallel_logits``: float [1, T / CP, V_local], each sequence cut separately into 2·CP
    chunks. ``target``: int64 [1, T], unshifted, or with ``target_is_pre_rolled`` [1, T / CP], the
    token that each local position predicts. ``cu_seqlens_padded``: integers [n + 1], sequence
    starts in [T] and the last end. Other arguments: `from_parallel_logits_to_logprobs`.

    Rows are zero after the log-probs of their sequence, and cut at ``unpacked_seqlen``.
    """
    plan = LogprobPlan.between(
        vocab_start_index, vocab_end_index, group, chunk_size, sampling_params
    )
    local = target.to(vocab_parallel_logits.device)
    if not target_is_pre_rolled:
        local = packed_targets(local[0], cu_seqlens_padded, cp_group).unsqueeze(0)
    logprobs = PlannedLogprob.apply(vocab_parallel_logits, local, plan, inference_only)
    return unpack(logprobs[0], cu_seqlens_padded, unpacked_seqlen, cp_group)


def get_next_token_logprobs_from_logits(
    input_ids: Tensor,
    next_token_logits: Tensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """Compute log-probs of ``input_ids[:, 1:]``, float32 [B, S-1], for any layout of the logits.

    ``input_ids``: int64 [B, S]. ``next_token_logits``: float [B, S, V], with
    ``vocab_parallel_group`` [B, S / CP, V_local], part ``vocab_parallel_rank`` of the padded
    vocabulary, or a DTensor with ``seq_index`` (int64 [S]), the sequence's order under context
    parallelism. Raises LayoutError if the rank is missing.
    """
    if isinstance(next_token_logits, DTensor) and vocab_parallel_group is None:
        return get_logprobs_from_vocab_parallel_logits(
            next_token_logits, input_ids, seq_index=seq_index, sampling_params=sampling_params
        )
    logits, shard = local_shard(next_token_logits, vocab_parallel_rank, vocab_parallel_group)
    return from_parallel_logits_to_logprobs(
        logits,
        input_ids,
        shard.start,
        shard.start + shard.columns,
        vocab_parallel_group,
        inference_only=not torch.is_grad_enabled(),
        cp_group=context_parallel_group,
        sampling_params=sampling_params,
    )
