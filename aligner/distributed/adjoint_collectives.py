"""Collectives along the first dimension whose gradients are their exact adjoints."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def gather_first(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[n, ...] of every rank one after the other: [ranks * n, ...].

    Differentiable: the gradients of all ranks are summed, and each takes its own part.
    """
    if group is None or dist.get_world_size(group) == 1:
        return local
    return _GatherFirst.apply(local, group)


def reduce_scatter_first(whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum [ranks * n, ...] over the ranks and keep this rank's [n, ...]; no gradient."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return whole
    local = whole.new_empty(whole.shape[0] // ranks, *whole.shape[1:])
    dist.reduce_scatter(local, list(whole.contiguous().chunk(ranks)), group=group)
    return local


class _GatherFirst(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = local.new_empty(local.shape[0] * dist.get_world_size(group), *local.shape[1:])
        dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_first(grad_outputs[0], ctx.group), None


class SumGradient(torch.autograd.Function):
    """Identity on a tensor that every rank holds; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, replicated: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the tensor itself, float [...], the same on every rank of ``group``."""
        ctx.group = group
        return replicated.view_as(replicated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """All-reduce the gradient [...]; none for the group."""
        total = grad_outputs[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
