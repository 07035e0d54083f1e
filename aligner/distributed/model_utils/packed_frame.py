"""Index arithmetic of packed sequences: shifted targets, and unpacking to one row per sequence.

Indices of all sequences are computed at once from the boundaries, on the device of the tokens.

Shape legend: ``n`` sequences, ``T`` packed tokens, ``T_cp = T / CP`` packed tokens on this rank.
The padded length of each sequence is a multiple of 2·CP. The tokens of a sequence on a rank are
contiguous, in the chunk order of `aligner.distributed.model_utils.context_shard`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.parallel.collectives import gather_first
from aligner.parallel.context import holder, local_position


def packed_targets(
    target: Tensor, cu_seqlens_padded: Tensor, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Return the token that each local position predicts, int64 [T_cp], from int64 [T].

    ``cu_seqlens_padded``: integers [n + 1], the starts of the sequences, then the end of the last
    sequence. The last position of a sequence predicts its first token. `unpack` drops this
    prediction.
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
    """Gather each rank's packed float [T_cp] into padded rows [n, unpacked_seqlen - 1].

    The last position of each sequence is dropped, and positions after the end of a sequence are 0.
    A sequence longer than ``unpacked_seqlen`` is cut. The function is differentiable: gradients are
    summed over the context-parallel ranks (`AllGatherCPTensor`).
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
