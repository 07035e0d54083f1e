"""Chains of small operations in few passes over memory: SwiGLU, RMSNorm, dropout and addition.

On a CPU, SwiGLU and RMSNorm have their gradients written out. Composed of torch's operations they
write and read a tensor for every step of the chain rule, and join the gradients of split tensors by
another copy; that, not the arithmetic, is what they cost.

On a GPU, megatron-core's `jit_fuser` makes one kernel of a chain. Inside a fused kernel bf16 is
computed in float32 and rounded once, where the chain rounds after every operation: the result
differs from the chain's in the last bit, towards the exact one. On a CPU nothing is fused.
"""

import functools
import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aligner.architecture import GPTArchitecture
from aligner.device import accelerator
from aligner.kernels.linear_product import Origin


def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """``s · b`` with ``s = a·σ(a)``; ``ds / da = σ + s - s·σ``."""

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
    """``silu(gate) * up`` of float ``[..., 2 * F]``, the gate in the first half; ``[..., F]``."""
    return Origin(_swiglu, (gate_and_up.detach(),)).note(_SwiGLU.apply(gate_and_up))


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
    """``hidden`` float ``[..., H]`` over the root of its mean square, times ``weight`` ``[H]``."""
    out, normal = _RMSNorm.apply(hidden, weight, eps)
    return Origin(torch.mul, (normal, weight.detach())).note(out)


class Norm(nn.Module):
    """LayerNorm, LayerNorm1P (weight stored minus one) or RMSNorm, by the config.

    Its parameters are marked ``sequence_parallel``, so that megatron-core sums their gradients
    over tensor-parallel ranks that each saw a part of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.is_rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if self.zero_centered:
            nn.init.zeros_(self.weight)
        self.bias = (
            None
            if self.is_rms
            else nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        )
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension of ``hidden`` [..., H]; same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.is_rms:
            # In bf16 torch's own computes in float32 inside.
            single = hidden.dtype == weight.dtype == torch.float32
            if single and hidden.device.type == "cpu":
                return rms_norm(hidden, weight, self.eps)
            return F.rms_norm(hidden, weight.shape, weight, self.eps)
        return F.layer_norm(hidden, weight.shape, weight, self.bias, self.eps)


def rms_norm_rows(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of float32 [n, H] to the bit, without gradients."""
    return (rows * _inverse_rms(rows, eps)).mul_(weight)


@functools.cache
def missing_for_kernels() -> str | None:
    """Missing requirements of `torch.compile` for GPU kernels, in words; None: all are there."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers if name):
        return "there is no C compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's C headers are not installed"
    return None


@dataclass
class GPTConfig(TransformerConfig):
    """megatron-core's configuration and what it has no name for."""

    rotates_in_one_kernel: bool = False


@dataclass(frozen=True)
class Fusions:
    """Chains of operations that are fused."""

    swiglu: bool = False
    rotary: bool = False
    bias: bool = False  # of a linear, with the residual
    gradient_sum: bool = False  # a weight's gradient is added to the buffer by its product

    @classmethod
    def of(cls, architecture: GPTArchitecture, wanted: bool) -> "Fusions":
        """Chains that can be fused here for this architecture, where ``wanted``.

        Left out is what is not the same function: megatron-core's fused GELU is the tanh
        approximation, and a fused dropout draws other random numbers than the one that full
        recomputation repeats. The gradient sum is Apex's kernel, and needs its extension.
        """
        if not (wanted and accelerator.has_gpu()):
            return cls()
        compiles = missing_for_kernels() is None
        biased_experts = architecture.num_moe_experts is not None and architecture.bias_linear
        rotary = compiles and architecture.position_embedding == "rope"
        if rotary:
            megatron_attention.apply_rotary_pos_emb = _apply_rotary
        return cls(
            swiglu=compiles and architecture.activation == "swiglu" and not biased_experts,
            rotary=rotary,
            bias=compiles and architecture.bias_linear and not architecture.hidden_dropout,
            gradient_sum=bool(megatron_layers._grad_accum_fusion_available),
        )


@jit_fuser
def turned(heads: Tensor, angles: Tensor, sign: float) -> Tensor:
    """Float ``heads`` ``[S, B, N, D]`` turned by ``angles`` times ``sign``.

    ``angles``: float ``[S, 1 or B, 1, D_rot]``. Pairs are column i and ``i + D_rot / 2``; columns
    from ``D_rot`` on stay.
    """
    width = angles.shape[-1]
    cos, sin = angles.cos(), angles.sin() * sign
    first, second = heads[..., :width].float().chunk(2, dim=-1)
    halves = (
        first * cos[..., : width // 2] - second * sin[..., : width // 2],
        second * cos[..., width // 2 :] + first * sin[..., width // 2 :],
    )
    parts = [half.to(heads.dtype) for half in halves]
    return torch.cat((*parts, heads[..., width:]), dim=-1)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return turned(heads, angles, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return turned(grad, ctx.saved_tensors[0], -1.0), None


_megatron_rotary = megatron_attention.apply_rotary_pos_emb


def _apply_rotary(
    t: Tensor,
    freqs: Tensor,
    config: TransformerConfig,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    **arguments: Any,
) -> Tensor:
    """megatron-core's function of this name; in one kernel for models that ask for it."""
    fused = getattr(config, "rotates_in_one_kernel", False)
    if fused and cu_seqlens is None and mscale == 1.0 and not config.rotary_interleaved:
        return _Turned.apply(t, freqs)
    return _megatron_rotary(t, freqs, config, cu_seqlens, mscale, **arguments)
