"""SwiGLU and RMSNorm with few passes over memory on a CPU.

Their gradients are handwritten, because autograd would read and write a tensor for every operation.
For GPUs, `aligner.models.gpt.layers.fusions` selects fused kernels.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aligner.kernels.linear_product import Origin


def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """``s · b`` with ``s = a·σ(a)``. ``ds / da = σ + s - s·σ``."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        return _swiglu(gate_and_up)

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
    """Return ``silu(gate) * up``, ``[..., F]``, of the two halves of float ``[..., 2 * F]``."""
    return Origin(_swiglu, (gate_and_up.detach(),)).note(_SwiGLU.apply(gate_and_up))


class SwiGLU(nn.Module):
    """Activation module of megatron-core's MLP that computes `swiglu`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.gated_linear_unit
        assert config.activation_func is F.silu
        # megatron-core's options of a gated unit that `swiglu` does not support.
        assert config.activation_func_clamp_value is None
        assert config.glu_linear_offset == 0.0

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Compute `swiglu` of float ``[..., 2 * F]``."""
        return swiglu(gate_and_up)


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1, 1), value, dtype=dtype, device=device)


def _inverse_rms(rows: Tensor, eps: float) -> Tensor:
    """Compute the inverse root mean square of each row of ``[n, H]``, ``[n, 1]``."""
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    epsilon = _constant(eps, rows.dtype, rows.device)
    return torch.addcmul(epsilon, length, length, value=1.0 / rows.shape[-1]).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """``x · w / rms(x)``. With ``n = x / rms(x)``: ``dx = (w·g - n·mean(w·g·n)) / rms(x)``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows = hidden.reshape(-1, hidden.shape[-1])
        inverse = _inverse_rms(rows, eps)
        normal = rows * inverse
        ctx.mark_non_differentiable(normal)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(normal, inverse, weight)
        return (normal * weight).view(hidden.shape), normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        normal, inverse, weight = ctx.saved_tensors
        rows = grad.reshape(normal.shape)
        product = rows * normal
        grad_weight = product.sum(dim=0)
        share = (product @ weight).unsqueeze(1).mul_(inverse).mul_(1.0 / weight.shape[0])
        grad_hidden = torch.mul(rows, inverse, out=product).mul_(weight)
        return grad_hidden.addcmul_(normal, share, value=-1.0).view(grad.shape), grad_weight, None


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide float ``hidden`` ``[..., H]`` by its root mean square and multiply by ``weight``."""
    out, normal = _RMSNorm.apply(hidden, weight, eps)
    return Origin(torch.mul, (normal, weight.detach())).note(out)


class Norm(nn.Module):
    """LayerNorm, LayerNorm1P (stores the weight minus 1) or RMSNorm, as the config says.

    The parameters have an attribute ``sequence_parallel``. If it is true, megatron-core sums their
    gradients over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.is_rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if self.zero_centered:
            nn.init.zeros_(self.weight)
        self.bias: nn.Parameter | None = None
        if not self.is_rms:
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension of ``hidden`` [..., H]. Shape and dtype do not change."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.is_rms and self.zero_centered and hidden.dtype != torch.float32:
            # In float32, because 1 + weight needs more digits than the weight.
            single = F.rms_norm(hidden.float(), weight.shape, self.weight.float() + 1, self.eps)
            return single.to(hidden.dtype)
        if self.is_rms:
            # In bf16, torch's function computes in float32 internally.
            single = hidden.dtype == weight.dtype == torch.float32
            if single and hidden.device.type == "cpu":
                return rms_norm(hidden, weight, self.eps)
            return F.rms_norm(hidden, weight.shape, weight, self.eps)
        return F.layer_norm(hidden, weight.shape, weight, self.bias, self.eps)


def rms_norm_rows(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` of float32 ``[n, H]``, bit for bit, without gradients."""
    return (rows * _inverse_rms(rows, eps)).mul_(weight)
