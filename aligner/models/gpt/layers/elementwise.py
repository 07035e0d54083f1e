"""Chains of elementwise operations in few passes over memory: SwiGLU, RMSNorm, rotary embedding.

On a CPU, SwiGLU and RMSNorm have handwritten gradients, because autograd reads and writes a tensor
for every step of the chain rule. On a GPU, megatron-core's `jit_fuser` compiles a chain into one
kernel, which computes bf16 in float32 and rounds once. The last bit then differs from the chain.
"""

import functools
import importlib.util
import math
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn.functional
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aligner.architecture import BranchNorms, GPTArchitecture
from aligner.device import accelerator
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
    """Return ``1 / rms`` of rows ``[n, H]``, as ``[n, 1]``, in few operations for decoding."""
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    epsilon = _constant(eps, rows.dtype, rows.device)
    return torch.addcmul(epsilon, length, length, value=1.0 / rows.shape[-1]).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """``x · w / rms(x)``, with ``n = x / rms(x)``: ``dx = (w·g - n·mean(w·g·n)) / rms(x)``."""

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
    """LayerNorm, LayerNorm1P (weight stored minus one) or RMSNorm, selected by the config.

    The mark ``sequence_parallel`` makes megatron-core sum the parameters' gradients over
    tensor-parallel ranks.
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
            # 1 + weight has more digits than the weight.
            single = F.rms_norm(hidden.float(), weight.shape, self.weight.float() + 1, self.eps)
            return single.to(hidden.dtype)
        if self.is_rms:
            # In bf16, torch's function computes in float32 internally.
            single = hidden.dtype == weight.dtype == torch.float32
            if single and hidden.device.type == "cpu":
                return rms_norm(hidden, weight, self.eps)
            return F.rms_norm(hidden, weight.shape, weight, self.eps)
        return F.layer_norm(hidden, weight.shape, weight, self.bias, self.eps)


class FinalNorm(Norm):
    """`Norm` before the output layer, divided as the logits are to be (Granite)."""

    def __init__(self, config: "GPTConfig", hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.divisor = config.logits_divisor

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension of ``hidden`` [..., H], and divide."""
        return super().forward(hidden) / self.divisor


class AllHeadsNorm(nn.Module):
    """RMSNorm over the heads of all tensor-parallel ranks together (OLMo 2)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int
    ) -> None:
        super().__init__()
        self.size, self.eps = heads * hidden_size, eps
        self.ranks = config.tensor_model_parallel_size
        weight = nn.Parameter(torch.ones(self.size // self.ranks, dtype=config.params_dtype))
        megatron_layers.set_tensor_model_parallel_attributes(weight, True, 0, 1)
        self.all_heads = nn.ParameterDict({"weight": weight})

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise float ``heads`` ``[S, B, N, D]`` over N and D. The shape does not change."""
        rows = heads.flatten(2).float()
        squares = rows.square().sum(-1, keepdim=True)
        if self.ranks > 1:  # a sum in both directions, because every rank uses the result
            group = parallel_state.get_tensor_model_parallel_group()
            squares = torch.distributed.nn.functional.all_reduce(squares, group=group)
        normal = rows * (squares / self.size + self.eps).rsqrt()
        return (normal * self.all_heads["weight"]).to(heads.dtype).view_as(heads)


class BranchAdd(nn.Module):
    """Addition of a branch to the residual, normalised and multiplied first."""

    def __init__(self, config: "GPTConfig") -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.norm = nn.Identity() if config.branch_norms == "before" else Norm(config, size, eps)
        self.multiplier = config.residual_multiplier

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function of (branch and its bias, residual, dropout) that adds."""

        def add(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            out, bias = branch
            out = self.norm(out if bias is None else out + bias) * self.multiplier
            return residual + F.dropout(out, dropout, training)

        return add


def rms_norm_rows(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` of float32 ``[n, H]`` without gradients, with equal bits."""
    return (rows * _inverse_rms(rows, eps)).mul_(weight)


@functools.cache
def missing_for_kernels() -> str | None:
    """Name a missing requirement of `torch.compile` for GPU kernels, or return None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers if name):
        return "a C compiler is missing"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's C headers are not installed"
    return None


@dataclass
class GPTConfig(TransformerConfig):
    """megatron-core's configuration with additional settings."""

    rotates_in_one_kernel: bool = False
    # Factor of rotated queries and keys, as megatron-core's attention reads it.
    yarn_mscale: float = 0.0
    yarn_mscale_all_dim: float = 0.0
    yarn_rotary_scaling_factor: float = math.e
    # See `GPTArchitecture`.
    qk_norm_over_heads: bool = False
    branch_norms: BranchNorms = "before"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    window_rotary_base: float | None = None
    rotary_scale: float = 1.0  # by which all rotary angles are divided

    @property
    def adds_plainly(self) -> bool:
        """True if attention and MLP add their output to the residual as it is."""
        return self.branch_norms == "before" and self.residual_multiplier == 1.0

    @property
    def embedding_factor(self) -> float:
        """``embedding_multiplier`` in the precision of the weights, as in transformers."""
        return torch.tensor(self.embedding_multiplier, dtype=self.params_dtype).item()


@dataclass(frozen=True)
class Fusions:
    """Chains of operations that are fused."""

    swiglu: bool = False
    rotary: bool = False
    bias: bool = False  # addition of a linear layer's bias and the residual
    gradient_sum: bool = False  # the weight gradient's product accumulates into the buffer

    @classmethod
    def of(cls, architecture: GPTArchitecture, enabled: bool) -> "Fusions":
        """Select the chains that can be fused on this machine for this architecture.

        Fusions that change the function are excluded, such as megatron-core's fused GELU (tanh
        approximation) and fused dropout (other random numbers than full recomputation).
        """
        if not (enabled and accelerator.has_gpu()):
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
def rotate(heads: Tensor, angles: Tensor, sign: float) -> Tensor:
    """Rotate float ``heads`` ``[S, B, N, D]`` by ``angles`` times ``sign``.

    ``angles``: float ``[S, 1 or B, 1, D_rot]``. Column i is paired with ``i + D_rot / 2``. Columns
    from ``D_rot`` on are unchanged.
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


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return rotate(heads, angles, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rotate(grad, ctx.saved_tensors[0], -1.0), None


_megatron_rotary = megatron_attention.apply_rotary_pos_emb


def _apply_rotary(
    t: Tensor,
    freqs: Tensor,
    config: TransformerConfig,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    **arguments: Any,
) -> Tensor:
    """Replace megatron-core's function of this name, with a fused kernel if enabled."""
    fused = getattr(config, "rotates_in_one_kernel", False)
    if fused and cu_seqlens is None and mscale == 1.0 and not config.rotary_interleaved:
        return _Rotation.apply(t, freqs)
    return _megatron_rotary(t, freqs, config, cu_seqlens, mscale, **arguments)
