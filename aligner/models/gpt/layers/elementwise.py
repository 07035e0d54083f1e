"""SwiGLU and RMSNorm for training on CPU in few passes over memory.

The same formulas composed of torch's operations write and read a tensor for every step of the chain
rule, and join the gradients of split tensors by another copy. On a CPU that, not the arithmetic, is
what they cost.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _SwiGLU(torch.autograd.Function):
    """``s · b`` with ``s = a·σ(a)``; ``ds / da = σ + s - s·σ``."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_and_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        torch.mul(silu, grad, out=grad_up)
        slope = silu.addcmul_(silu, sigmoid, value=-1.0).add_(sigmoid)
        torch.mul(slope.mul_(grad), up, out=grad_gate)
        return result


def swiglu(gate_and_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of float ``[..., 2 * F]``, the gate in the first half; ``[..., F]``."""
    return _SwiGLU.apply(gate_and_up)


class SwiGLU(nn.Module):
    """`swiglu` as megatron-core's MLP takes an activation."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.gated_linear_unit
        assert config.activation_func is F.silu
        # What megatron-core's own adds to a gated unit, and we do not have.
        assert config.activation_func_clamp_value is None
        assert config.glu_linear_offset == 0.0

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Float ``[..., 2 * F]`` to ``[..., F]``."""
        return swiglu(gate_and_up)


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1, 1), value, dtype=dtype, device=device)


def _inverse_rms(rows: Tensor, eps: float) -> Tensor:
    """[n, H] to [n, 1], in as few operations as it takes: decoding calls this on few rows."""
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    epsilon = _constant(eps, rows.dtype, rows.device)
    return torch.addcmul(epsilon, length, length, value=1.0 / rows.shape[-1]).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """``x · w / rms(x)``; with ``n = x / rms(x)``: ``dx = (w·g - n·mean(w·g·n)) / rms(x)``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        inverse = _inverse_rms(rows, eps)
        normal = rows * inverse
        ctx.save_for_backward(normal, inverse, weight)
        return (normal * weight).view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, inverse, weight = ctx.saved_tensors
        rows = grad.reshape(normal.shape)
        product = rows * normal
        grad_weight = product.sum(dim=0)
        share = (product @ weight).unsqueeze(1).mul_(inverse).mul_(1.0 / weight.shape[0])
        grad_hidden = torch.mul(rows, inverse, out=product).mul_(weight)
        return grad_hidden.addcmul_(normal, share, value=-1.0).view(grad.shape), grad_weight, None


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``hidden`` float ``[..., H]`` over the root of its mean square, times ``weight`` ``[H]``."""
    return _RMSNorm.apply(hidden, weight, eps)


def rms_norm_rows(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of float32 [n, H] to the bit, without gradients."""
    return (rows * _inverse_rms(rows, eps)).mul_(weight)
