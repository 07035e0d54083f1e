"""Next-token log-probs from logits that are a DTensor, or the local part of a DTensor.

Mesh dimension ``tp`` shards the vocabulary. The optional dimension ``cp`` shards the sequence: the
i-th token of the concatenated shards is at position ``seq_index[i]`` of the sequence.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from aligner.distributed.model_utils.logits_logprob import LogprobPlan, PlannedLogprob
from aligner.errors import LayoutError
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor | DTensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """Compute log-probs of ``input_ids[:, 1:]``, float32 [B, S-1], on every rank.

    ``vocab_parallel_logits``: float [B, S, V], whose last dimension is sharded over the mesh
    dimension ``tp``. V need not be a multiple of the number of ``tp`` ranks. For the other
    arguments see `dtensor_from_parallel_logits_to_logprobs`.
    """
    mesh = vocab_parallel_logits.device_mesh
    names = mesh.mesh_dim_names or ()
    if seq_index is not None and "cp" not in names:
        raise LayoutError(
            f"seq_index describes a sequence sharded over 'cp', but the mesh has {names}. Name its "
            "context-parallel dimension 'cp', or leave seq_index out"
        )
    local_logits, shard = local_shard(vocab_parallel_logits)
    # Ranks exchange logits for top-k and top-p, so all need the same number of columns.
    columns = -(-vocab_parallel_logits.shape[-1] // mesh["tp"].size())  # rounded up
    if local_logits.shape[-1] < columns:
        local_logits = F.pad(local_logits, (0, columns - local_logits.shape[-1]))
    # The padded columns are after `vocab_end_index`, so they are ignored.
    return dtensor_from_parallel_logits_to_logprobs(
        local_logits,
        input_ids,
        shard.start,
        shard.start + shard.columns,
        mesh.get_group("tp"),
        inference_only=not torch.is_grad_enabled(),
        seq_index=seq_index,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )


def local_shard(
    logits: Tensor, rank: int | None = None, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, VocabShard]:
    """Return this rank's logits [B, S / CP, V_local], and the range of their token ids.

    ``logits``: a DTensor, or this rank's part, whose position is ``rank`` in ``group``. The group's
    ranks share the padded vocabulary evenly. Raises `LayoutError` if ``group`` is given without
    ``rank``.
    """
    width = logits.shape[-1]
    if isinstance(logits, DTensor) and group is None:
        # The last ranks may store fewer columns, or none.
        group = logits.device_mesh.get_group("tp")
        vocab, width = width, -(-width // dist.get_world_size(group))
        start = min(width * dist.get_rank(group), vocab)
        end = min(start + width, vocab)
        return logits.to_local(), VocabShard.between(start, end, group)
    if group is not None and rank is None:
        raise LayoutError(
            "vocab_parallel_rank is missing. Pass it together with vocab_parallel_group"
        )
    start = width * (rank or 0)
    return logits, VocabShard.between(start, start + width, group)


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: DTensor | Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """Compute log-probs of all tokens after the first, float32 [B, S-1], on every rank.

    ``vocab_parallel_logits``: this rank's float [B, S / CP, V_local]. ``target``: int64 [B, S], the
    input tokens, not shifted. If it is a DTensor sharded over ``cp`` like the logits, column i is
    the token at position ``seq_index[i]`` (int64 [S]). For the other arguments see
    `from_parallel_logits_to_logprobs`.

    Backward does not sum gradients over ``cp``. They are exact if all ranks compute the same loss.
    """
    plan = LogprobPlan.between(
        vocab_start_index, vocab_end_index, tp_group, chunk_size, sampling_params
    )
    mesh = target.device_mesh if isinstance(target, DTensor) else None
    names = () if mesh is None else mesh.mesh_dim_names or ()
    # Without context parallelism every rank stores the complete sequence.
    if mesh is None or "cp" not in names or mesh["cp"].size() == 1:
        tokens = target.full_tensor() if isinstance(target, DTensor) else target
        next_tokens = tokens.to(vocab_parallel_logits.device).roll(-1, dims=-1)
        logprobs = PlannedLogprob.apply(vocab_parallel_logits, next_tokens, plan, inference_only)
        return logprobs[:, :-1]
    if seq_index is None:
        raise LayoutError(
            "seq_index is missing, but target is sharded over 'cp'. Pass each column's position"
        )
    assert isinstance(target, DTensor)
    # Sort the columns by position, shift to the next token, and undo the sorting.
    by_position = seq_index.argsort()
    next_tokens = target.full_tensor()[:, by_position].roll(-1, dims=-1)[:, seq_index]
    # Shard the next tokens like the target.
    placements = target.placements
    replicated = DTensor.from_local(next_tokens, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local_targets = replicated.redistribute(placements=placements).to_local()
    # Compute this rank's log-probs, gather all, and sort them by position.
    logprobs = PlannedLogprob.apply(vocab_parallel_logits, local_targets, plan, inference_only)
    gathered = DTensor.from_local(logprobs, mesh, placements, run_check=False).full_tensor()
    return gathered[:, by_position][:, :-1]
