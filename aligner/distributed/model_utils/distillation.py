"""Student and teacher log-probs at the teacher's most probable tokens."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from aligner.distributed.model_utils.context_shard import gather_context, scatter_context
from aligner.distributed.model_utils.dtensor_logprobs import local_shard
from aligner.distributed.model_utils.logits_logprob import ChunkedDistributedGatherLogprob
from aligner.distributed.model_utils.vocab_entropy import ChunkedDistributedEntropy
from aligner.distributed.model_utils.vocab_topk import gather_logits_at_global_indices
from aligner.errors import LayoutError
from aligner.logprobs.output_layer import VocabShard

_CHUNK_SIZE = 1024  # positions per step


def get_distillation_topk_logprobs_from_logits(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute log-probs of student and teacher for the teacher's ``k`` most probable tokens.

    Args:
        student_logits: float [B, S, V]; a DTensor [B, S, V] on a mesh with ``tp`` (and ``cp``); or
            this rank's [B, S_cp, V_local], if ``vocab_parallel_group`` is given.
        teacher_topk_logits: float [B, S, k].
        teacher_topk_indices: int64 [B, S, k], token ids.
        zero_outside_topk: True normalises the student over the vocabulary, False over the k tokens.
            The teacher is always normalised over the k tokens.
        calculate_entropy: whether to compute the third result.
        vocab_parallel_rank: rank in ``vocab_parallel_group``.
        vocab_parallel_group: ranks that share the vocabulary.
        context_parallel_group: ranks that share the sequence.

    Returns:
        Student log-probs [B, S-1, k], teacher log-probs [B, S-1, k], and the student's negative
        entropy ``Σ_v p_v log p_v`` over the vocabulary [B, S-1] or None. All are float32.
    """
    if teacher_topk_indices.shape[-1] == 0:
        raise LayoutError("teacher_topk_indices has 0 tokens per position. Give at least 1")
    cp_group = context_parallel_group
    if isinstance(student_logits, DTensor):
        mesh = student_logits.device_mesh
        cp_group = mesh.get_group("cp") if "cp" in (mesh.mesh_dim_names or ()) else None
        vocab_parallel_group = None
    logits, shard = local_shard(student_logits, vocab_parallel_rank, vocab_parallel_group)
    # Student: log-probs or raw logits at the teacher's tokens, on every rank.
    indices = teacher_topk_indices.to(logits.device)
    length = indices.shape[1]
    if zero_outside_topk:
        local = scatter_context(indices, logits.shape[1], cp_group)
        student = gather_context(logprobs_of(logits, local, shard), length, cp_group)
    else:
        student = gather_logits_at_global_indices(
            logits,
            indices,
            shard.group,
            cp_group,
            vocab_start_index=shard.start,
            vocab_end_index=shard.start + shard.columns,
        )
        student = student.log_softmax(dim=-1)
    # Teacher: renormalised over the k tokens.
    teacher = teacher_topk_logits.to(student).log_softmax(dim=-1)
    if not calculate_entropy:
        return student[:, :-1], teacher[:, :-1], None
    entropy = gather_context(mean_logprob(logits, shard), length, cp_group)
    return student[:, :-1], teacher[:, :-1], entropy[:, :-1]


def logprobs_of(logits: Tensor, indices: Tensor, shard: VocabShard) -> Tensor:
    """Compute log-probs of token ids ``indices`` [B, S, K] from logits [B, S, V_local]."""
    end = shard.start + shard.columns
    return ChunkedDistributedGatherLogprob.apply(
        logits, indices, shard.start, end, _CHUNK_SIZE, shard.group, not torch.is_grad_enabled()
    )


def mean_logprob(logits: Tensor, shard: VocabShard) -> Tensor:
    """Compute the negative entropy ``Σ_v p_v log p_v`` [B, S] from logits [B, S, V_local]."""
    return ChunkedDistributedEntropy.apply(
        logits[..., : shard.columns], _CHUNK_SIZE, shard.group, not torch.is_grad_enabled()
    )
