"""Conversion between logits split over the vocabulary and logits split over the tokens.

Shapes: ``BS`` tokens (batch and sequence flattened), ``BS_local = BS / ranks``, ``V`` vocabulary,
``V_local = V / ranks``.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from aligner.errors import LayoutError


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Convert logits [BS, V_local] of each rank to [BS_local, V]: rank r gets part r of the tokens.

    Any dtype is supported. Backward is the inverse conversion. Raises `LayoutError` unless the
    logits have two dimensions and BS is a multiple of the group size.
    """
    logits, ranks = vocab_parallel_logits, dist.get_world_size(tp_group)
    _check(logits, "tokens", 0, ranks)
    received = _exchange(logits.contiguous(), tp_group)
    columns = logits.shape[1]
    return received.view(ranks, -1, columns).transpose(0, 1).reshape(-1, ranks * columns)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Convert logits [BS_local, V] of each rank to [BS, V_local], inverse of `all_to_all_vp2sq`."""
    logits, ranks = seq_parallel_logits, dist.get_world_size(tp_group)
    _check(logits, "vocabulary columns", 1, ranks)
    rows, columns = logits.shape
    sent = logits.view(rows, ranks, columns // ranks).transpose(0, 1).contiguous()
    return _exchange(sent, tp_group).view(ranks * rows, columns // ranks)


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_to_all_single(torch.empty_like(blocks), blocks, group=group)


def _check(logits: Tensor, dimension_name: str, dimension: int, ranks: int) -> None:
    if logits.ndim != 2:
        raise LayoutError(
            f"logits of shape {list(logits.shape)} must have two dimensions. Flatten batch and "
            "sequence into one dimension"
        )
    if logits.shape[dimension] % ranks:
        raise LayoutError(
            f"{logits.shape[dimension]} {dimension_name} cannot be split equally over {ranks} "
            f"tensor-parallel ranks. Pad to a multiple of {ranks}"
        )
