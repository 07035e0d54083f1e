"""Shards sequences over context-parallel ranks, and gathers them again.

A sequence is cut into 2·CP chunks. Rank r stores chunks r and 2·CP - 1 - r
(`aligner.parallel.context`). Shapes: ``n`` packed sequences have ``T`` tokens, of which each rank
stores ``T_cp = T / CP``, sequence by sequence. Padded lengths are multiples of 2·CP.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.errors import LayoutError
from aligner.parallel.collectives import gather_first, reduce_scatter_first
from aligner.parallel.context import holder, local_position


def _get_tokens_on_this_cp_rank(
    input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1
) -> Tensor:
    """Select rank r's part of a sequence: chunks r and 2 CP - 1 - r of 2 CP equal chunks."""
    if cp_size == 1:
        return input_ids
    length = input_ids.shape[seq_dim]
    if length % (2 * cp_size):
        raise LayoutError(
            f"sequence length {length} is not a multiple of 2 x context parallel size {cp_size}. "
            f"Pad it to {length + -length % (2 * cp_size)}"
        )
    size = length // (2 * cp_size)
    parts = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return torch.cat([input_ids.narrow(seq_dim, part * size, size) for part in parts], dim=seq_dim)


class AllGatherCPTensor(torch.autograd.Function):
    """Gathers the chunks of all context-parallel ranks in the order of the sequence.

    Backward sums the gradients of all ranks and returns each rank its chunks. If every rank
    computes the loss, this sum is CP times too large. The mean over data- and context-parallel
    ranks, which megatron-core computes later, divides by CP.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cp_group: dist.ProcessGroup, seq_dim: int = 1) -> Tensor:
        """Gather [..., S / CP, ...] of each rank to [..., S, ...]. Any dtype."""
        ctx.group, ctx.seq_dim = cp_group, seq_dim
        ranks = dist.get_world_size(cp_group)
        if ranks == 1:
            return tensor.view_as(tensor)
        gathered = gather_first(tensor.movedim(seq_dim, 0), cp_group)
        return _reorder(gathered, _rank_order(ranks)).movedim(0, seq_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradients [..., S, ...] over ranks and return this rank's [..., S / CP, ...]."""
        ranks = dist.get_world_size(ctx.group)
        if ranks == 1:
            return grad_outputs[0], None, None
        order = sorted(range(2 * ranks), key=_rank_order(ranks).__getitem__)
        by_rank = _reorder(grad_outputs[0].movedim(ctx.seq_dim, 0), order)
        return reduce_scatter_first(by_rank, ctx.group).movedim(0, ctx.seq_dim), None, None


def _rank_order(ranks: int) -> list[int]:
    """For chunk 0, 1, 2, … of a sequence, return its position among the chunks sorted by rank."""
    first = [2 * rank for rank in range(ranks)]
    return first + [chunk + 1 for chunk in reversed(first)]


def _reorder(tensor: Tensor, order: list[int]) -> Tensor:
    chunks = tensor.unflatten(0, (len(order), -1)).unbind(0)
    return torch.cat([chunks[index] for index in order])


def allgather_cp_sharded_tensor(
    tensor: Tensor, cp_group: dist.ProcessGroup, seq_dim: int = 1
) -> Tensor:
    """Gather [..., S / CP, ...] of each rank to [..., S, ...]. See `AllGatherCPTensor`."""
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


def scatter_context(
    tensor: Tensor, local_length: int, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Return this rank's positions [B, S_cp, ...] of a tensor [B, S, ...], padded with zeros.

    ``local_length``: S_cp, the number of positions on each of the CP context-parallel ranks.
    """
    ranks = 1 if cp_group is None else dist.get_world_size(cp_group)
    padding = local_length * ranks - tensor.shape[1]
    if padding < 0:
        raise LayoutError(
            f"sequence length {tensor.shape[1]} exceeds the {local_length * ranks} positions of "
            f"the logits, {local_length} on each of {ranks} context-parallel ranks. Pass the "
            "process group over which the logits are sharded"
        )
    if padding:
        tensor = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, padding))
    if cp_group is None or ranks == 1:
        return tensor
    return _get_tokens_on_this_cp_rank(tensor, dist.get_rank(cp_group), ranks)


def gather_context(local: Tensor, length: int, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Gather [B, S_cp, ...] of each rank to [B, length, ...]. The inverse of `scatter_context`."""
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        local = allgather_cp_sharded_tensor(local, cp_group)
    return local[:, :length]


def packed_targets(
    target: Tensor, cu_seqlens_padded: Tensor, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Return the next token for each packed position on this rank, int64 [T_cp].

    ``target``: int64 [T], tokens of all packed sequences. ``cu_seqlens_padded``: integers [n + 1],
    start of each of n sequences and end of the last. The last position of a sequence has no next
    token: its target is the sequence's first token, and `unpack` drops it.
    """
    rank, ranks = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
    boundaries = cu_seqlens_padded.to(target.device, torch.int64)
    starts, ends = boundaries[:-1], boundaries[1:]
    local = torch.arange(target.shape[0] // ranks, device=target.device)
    sequence = torch.searchsorted(boundaries // ranks, local, right=True) - 1
    sequence = sequence.clamp(max=starts.shape[0] - 1)  # any sequence after the last boundary
    start, end = starts[sequence], ends[sequence]
    chunk = (end - start) // (2 * ranks)
    offset = local - start // ranks
    position = start + (offset if ranks == 1 else local_position(offset, chunk, rank, ranks))
    following = torch.where(position + 1 < end, position + 1, start)
    return target[following.clamp(max=target.shape[0] - 1)]


def unpack(
    values: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    cp_group: dist.ProcessGroup | None,
) -> Tensor:
    """Convert packed ``values``, [T_cp] on each rank, to one row per sequence.

    The result [n, unpacked_seqlen - 1] omits the last position of each sequence. Rows are padded
    with 0 or truncated. Backward sums gradients over context-parallel ranks.
    """
    boundaries = cu_seqlens_padded.to(values.device, torch.int64)
    starts, lengths = boundaries[:-1].unsqueeze(1), boundaries.diff().unsqueeze(1)
    offset = torch.arange(max(0, unpacked_seqlen - 1), device=values.device).expand(len(starts), -1)
    index = starts + offset
    ranks = 1 if cp_group is None else cp_group.size()
    if ranks > 1:
        rank, local_offset = holder(offset, (lengths // (2 * ranks)).clamp(min=1), ranks)
        index = rank * values.shape[0] + starts // ranks + local_offset
        values = gather_first(values, cp_group)
    zero_index = values.shape[0]  # an additional element for positions after the end
    index = torch.where(offset < lengths - 1, index, zero_index)
    return F.pad(values, (0, 1))[index]
