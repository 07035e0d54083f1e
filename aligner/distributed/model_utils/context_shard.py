"""Tokens that a context-parallel rank holds, and joining the sequence again.

A sequence is cut into 2·CP equal chunks and rank r holds chunks r and 2·CP - 1 - r, so that under
causal attention every rank has the same work.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.errors import LayoutError
from aligner.parallel.collectives import gather_first, reduce_scatter_first


def _get_tokens_on_this_cp_rank(
    input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1
) -> Tensor:
    """Chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of dimension ``seq_dim``, side by side.

    ``input_ids``: any dtype, [..., S, ...] with S a multiple of ``2 * cp_size`` (or ``cp_size`` 1).
    Returns [..., S / cp_size, ...].

    Raises:
        LayoutError: S does not divide.
    """
    if cp_size == 1:
        return input_ids
    length = input_ids.shape[seq_dim]
    if length % (2 * cp_size):
        raise LayoutError(
            f"sequence length {length} is not a multiple of 2 x context parallel size {cp_size}: "
            f"pad it to {length + -length % (2 * cp_size)}"
        )
    size = length // (2 * cp_size)
    parts = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return torch.cat([input_ids.narrow(seq_dim, part * size, size) for part in parts], dim=seq_dim)


class AllGatherCPTensor(torch.autograd.Function):
    """Every rank's chunks, put in the order of the sequence.

    The gradient is the exact adjoint: that of all ranks summed, of which each takes its own chunks.
    A loss that every rank computes from the whole sequence therefore counts CP times; the mean over
    data x context ranks, which data parallelism takes, makes it once again.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cp_group: dist.ProcessGroup, seq_dim: int = 1) -> Tensor:
        """[..., S / CP, ...] of each rank → [..., S, ...]; any dtype."""
        ctx.group, ctx.seq_dim = cp_group, seq_dim
        ranks = dist.get_world_size(cp_group)
        if ranks == 1:
            return tensor.view_as(tensor)
        gathered = gather_first(tensor.movedim(seq_dim, 0), cp_group)
        return _reorder(gathered, _rank_order(ranks)).movedim(0, seq_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """Reduce-scatter float [..., S, ...] to this rank's chunks [..., S / CP, ...]."""
        ranks = dist.get_world_size(ctx.group)
        if ranks == 1:
            return grad_outputs[0], None, None
        order = sorted(range(2 * ranks), key=_rank_order(ranks).__getitem__)
        by_rank = _reorder(grad_outputs[0].movedim(ctx.seq_dim, 0), order)
        return reduce_scatter_first(by_rank, ctx.group).movedim(0, ctx.seq_dim), None, None


def _rank_order(ranks: int) -> list[int]:
    """Index of each chunk of the sequence among the chunks of rank 0, rank 1, …"""
    first = [2 * rank for rank in range(ranks)]
    return first + [chunk + 1 for chunk in reversed(first)]


def _reorder(tensor: Tensor, order: list[int]) -> Tensor:
    """Cut dimension 0 into ``len(order)`` equal chunks and lay them out in that order."""
    chunks = tensor.unflatten(0, (len(order), -1)).unbind(0)
    return torch.cat([chunks[number] for number in order])


def allgather_cp_sharded_tensor(
    tensor: Tensor, cp_group: dist.ProcessGroup, seq_dim: int = 1
) -> Tensor:
    """`AllGatherCPTensor` as a function, differentiable: [..., S / CP, ...] → [..., S, ...].

    ``tensor``: of any dtype.
    """
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


def scatter_context(whole: Tensor, local_length: int, cp_group: dist.ProcessGroup | None) -> Tensor:
    """This rank's [B, S_cp, ...] of [B, S, ...], zeros behind S where ``S_cp * CP`` is longer.

    ``whole``: of any dtype.
    """
    ranks = 1 if cp_group is None else dist.get_world_size(cp_group)
    padding = local_length * ranks - whole.shape[1]
    if padding < 0:
        raise LayoutError(
            f"sequence length {whole.shape[1]} exceeds the {local_length} positions of logits on "
            f"each of {ranks} context-parallel ranks: pass the group the logits are sharded over"
        )
    if padding:
        whole = F.pad(whole, (0, 0) * (whole.ndim - 2) + (0, padding))
    if cp_group is None or ranks == 1:
        return whole
    return _get_tokens_on_this_cp_rank(whole, dist.get_rank(cp_group), ranks)


def gather_context(local: Tensor, length: int, cp_group: dist.ProcessGroup | None) -> Tensor:
    """[B, S_cp, ...] of every rank → [B, length, ...]: inverse of `scatter_context`."""
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        local = allgather_cp_sharded_tensor(local, cp_group)
    return local[:, :length]
