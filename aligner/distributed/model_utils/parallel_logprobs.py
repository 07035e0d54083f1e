"""Next-token log-probs [B, S-1] from logits in any parallel layout."""

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

    ``vocab_parallel_logits``: float [B, S / CP, V_local], where S may include padding. Its first
    columns are the token ids ``vocab_start_index`` to ``vocab_end_index - 1``, later columns are
    ignored padding. ``target``: int64 [B, S], not shifted, complete on every rank.
    ``inference_only``: save nothing for backward. ``chunk_size``: number of positions computed at a
    time, chosen to bound memory if None. ``sampling_params``: temperature, top-k and top-p of the
    distribution.

    Every rank returns all rows. Gradients are exact if all tensor-parallel ranks compute the same
    loss. Backward sums gradients over context-parallel ranks (`AllGatherCPTensor`).
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
    """Compute log-probs of packed sequences. Returns one row per sequence.

    The result is float32 [n, unpacked_seqlen - 1]. Rows are padded with 0 or truncated.

    ``vocab_parallel_logits``: float [1, T / CP, V_local], where each sequence is split over the CP
    ranks separately. ``target``: int64 [1, T], packed tokens, not shifted. With
    ``target_is_pre_rolled``: the next token of each position on this rank, [1, T / CP].
    ``cu_seqlens_padded``: integers [n + 1], start of each sequence and end of the last. For the
    other arguments see `from_parallel_logits_to_logprobs`.
    """
    plan = LogprobPlan.between(
        vocab_start_index, vocab_end_index, group, chunk_size, sampling_params
    )
    next_tokens = target.to(vocab_parallel_logits.device)
    if not target_is_pre_rolled:
        next_tokens = packed_targets(next_tokens[0], cu_seqlens_padded, cp_group).unsqueeze(0)
    logprobs = PlannedLogprob.apply(vocab_parallel_logits, next_tokens, plan, inference_only)
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
    """Compute log-probs of ``input_ids[:, 1:]``, float32 [B, S-1], from logits in any layout.

    Args:
        input_ids: int64 [B, S].
        next_token_logits: float [B, S, V], a DTensor, or one rank's float [B, S / CP, V_local].
        seq_index: int64 [S], position of each token, for a DTensor with a sharded sequence.
        vocab_parallel_rank: rank in ``vocab_parallel_group``, whose ranks share the padded
            vocabulary. Required with the group, or `LayoutError` is raised.
        context_parallel_group: ranks that share the sequence.
        sampling_params: temperature, top-k and top-p of the distribution.
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
