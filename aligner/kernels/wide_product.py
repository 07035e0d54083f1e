"""Products of matrices whose sums and results are float32, of bfloat16 matrices too.

A GPU multiplies bfloat16 numbers exactly, adds them up in float32 and can hand that out as it is
(`torch.mm` with ``out_dtype``): the same numbers as with float32 copies of the matrices, at the
speed of its bfloat16 units. Elsewhere the matrices are converted.

In gradients one factor is float32 itself: the gradient of the logits. It is rounded to bfloat16
once, relative error 2^-9 of each number, as the logits' gradient has in every library that keeps
bfloat16 logits; sums over it are float32 again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def has_wide_products(*matrices: Tensor) -> bool:
    """Return whether these matrices [n, m] are multiplied as they are, without a float32 copy."""
    return all(_has_kernel(each) and each.dtype == torch.bfloat16 for each in matrices)


def _has_kernel(matrix: Tensor) -> bool:
    return matrix.is_cuda  # PyTorch has it only for GPUs


def wide_mm(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``left @ right``, [n, k] by [k, m], without gradients.

    float32, or float64 for float64 matrices. ``out``: where the result goes, of its dtype.
    """
    if has_wide_products(left, right):
        return torch.mm(left, right, torch.float32, out=out)
    dtype = torch.promote_types(left.dtype, torch.float32)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


class _WideLinear(torch.autograd.Function):
    """Linear of bfloat16 matrices on a GPU; see the module for how gradients are rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_mm(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rounded = grad.to(x.dtype)
        grad_x = torch.mm(rounded, weight) if ctx.needs_input_grad[0] else None
        grad_weight = torch.mm(rounded.t(), x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight^T``, [n, k] by [m, k], float32 at least, differentiable."""
    if has_wide_products(x, weight):
        return _WideLinear.apply(x, weight)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) @ weight.to(dtype).t()
