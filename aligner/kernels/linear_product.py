"""``x @ weight^T`` with gradients, on CPU by oneDNN.

torch gives products of float32 matrices to MKL. For the shapes of a transformer's linear layers
oneDNN takes a sixth to a third less time on the processors tried (figures: benchmarks/LOG.md), but
adds up all terms of a sum one after the other, which rounds twice as much where they are many. It
is used for gradients of inputs, and for outputs of few terms. The gradient of the weight, a product
over rows, stays with MKL, which is faster there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Below this many multiplications the call around oneDNN's product costs more than it gains.
_LEAST_WORK = 2**22
_MOST_TERMS = 512  # of a sum in the forward pass


def has_onednn(tensor: Tensor) -> bool:
    """Return whether oneDNN has products for float ``tensor`` [..., n] here."""
    if tensor.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if tensor.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return tensor.dtype == torch.float32


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` float [..., in] times ``weight`` [out, in] to [..., out], without gradients."""
    # In bfloat16 torch's own product is oneDNN's.
    large = x.numel() * weight.shape[0] >= _LEAST_WORK
    if large and x.dtype == weight.dtype == torch.float32 and has_onednn(weight):
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return torch.matmul(x, weight.t())


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # A frozen weight, as under an adapter, needs no input in the backward pass.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        few = weight.shape[1] <= _MOST_TERMS
        return multiply(x, weight) if few else torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = multiply(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, grad_weight


def linear_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` float [..., in] times ``weight`` [out, in] to [..., out]."""
    return _LinearProduct.apply(x, weight)
