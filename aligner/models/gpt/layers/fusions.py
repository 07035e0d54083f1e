"""Chains of small operations as one GPU kernel each, by megatron-core's `jit_fuser`.

Inside a fused kernel bf16 is computed in float32 and rounded once, where the chain rounds after
every operation: the result differs from the chain's in the last bit, towards the exact one. On a
CPU nothing is fused.
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
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.architecture import GPTArchitecture
from aligner.distributed import accelerator


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
    """``heads`` ``[S, B, N, D]`` turned by ``sign`` times ``angles`` ``[S, 1 or B, 1, D_rot]``.

    Pairs are column i and ``i + D_rot / 2``; columns from ``D_rot`` on stay.
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
