"""Conversion between logits sharded over the vocabulary and logits sharded over the tokens.

Shape legend: ``BS`` tokens (batch and sequence flattened), ``BS_local = BS / ranks``, ``V`` whole
vocabulary, ``V_local = V / ranks``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.errors import LayoutError

Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Exchange [BS, V_local] of each rank for [BS_local, V], complete rows of some tokens.

    The dtype is any. Backward is the inverse exchange. Rank r gets the r-th part of the tokens.
    Raises LayoutError unless logits have two dimensions and BS is a multiple of the group size.
    """
    return _Exchange.apply(vocab_parallel_logits, tp_group, _vocab_to_sequence, _sequence_to_vocab)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Convert [BS_local, V] of each rank to [BS, V_local], the inverse of `all_to_all_vp2sq`."""
    return _Exchange.apply(seq_parallel_logits, tp_group, _sequence_to_vocab, _vocab_to_sequence)


class _Exchange(torch.autograd.Function):
    """The exchange ``convert`` of the logits, with ``invert`` of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, group: dist.ProcessGroup, convert: Exchange, invert: Exchange
    ) -> Tensor:
        ctx.group, ctx.invert = group, invert
        return convert(logits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.invert(grad_outputs[0], ctx.group), None, None, None


def _vocab_to_sequence(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    _check(logits, "tokens", 0, ranks)
    received = _exchange(logits.contiguous(), group)
    columns = logits.shape[1]
    return received.view(ranks, -1, columns).transpose(0, 1).reshape(-1, ranks * columns)


def _sequence_to_vocab(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    _check(logits, "vocabulary columns", 1, ranks)
    rows, columns = logits.shape
    sent = logits.view(rows, ranks, columns // ranks).transpose(0, 1).contiguous()
    return _exchange(sent, group).view(ranks * rows, columns // ranks)


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the r-th equal part of ``blocks`` to rank r. Return received parts in rank order."""
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def _check(logits: Tensor, dimension_name: str, dimension: int, ranks: int) -> None:
    if logits.ndim != 2:
        raise LayoutError(
            f"logits of shape {list(logits.shape)} must have two dimensions. Flatten batch and "
            "sequence into one"
        )
    if logits.shape[dimension] % ranks:
        raise LayoutError(
            f"{logits.shape[dimension]} {dimension_name} cannot be split equally over {ranks} "
            f"tensor-parallel ranks. Pad to a multiple of {ranks}"
        )
