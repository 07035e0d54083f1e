"""Configuration of the layers, and choice of the operations that a GPU fuses into one kernel.

megatron-core's `jit_fuser` compiles a chain of operations. The kernel computes bf16 in float32 and
rounds once, so that the last bit can differ from the unfused chain.
"""

import functools
import importlib.util
import math
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

from aligner.architecture import BranchNorms, GPTArchitecture
from aligner.device import accelerator


@functools.cache
def missing_for_kernels() -> str | None:
    """Return which requirement of `torch.compile` for GPUs is missing, None if all are met."""
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
    """megatron-core's configuration of a transformer, with additional settings."""

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
    attention_cap: float | None = None
    is_scored: bool = False
    window_rotary_base: float | None = None
    moe_router_normalizes: bool = True
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    value_channels: int | None = None
    rotated_channels: int = 0
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
    """Which chains of operations are fused into one GPU kernel."""

    swiglu: bool = False
    rotary: bool = False
    bias: bool = False  # addition of a linear layer's bias and the residual
    gradient_sum: bool = False  # the weight gradient's product accumulates into the buffer

    @classmethod
    def of(cls, architecture: GPTArchitecture, enabled: bool) -> "Fusions":
        """Select the chains that this machine can fuse for this architecture.

        Fusions with other results are excluded, such as megatron-core's fused GELU (a tanh
        approximation) and fused dropout (full recomputation would draw other random numbers).
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
    """Apply rotary embedding to ``heads``, float ``[S, B, N, D]``, by ``angles`` times ``sign``.

    ``angles``: float ``[S, 1 or B, 1, D_rot]``. Columns i and ``i + D_rot / 2`` are a pair. Columns
    from ``D_rot`` on do not change.
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
    """Apply rotary embedding by a fused kernel if enabled, or by megatron-core's function."""
    fused = getattr(config, "rotates_in_one_kernel", False)
    if fused and cu_seqlens is None and mscale == 1.0 and not config.rotary_interleaved:
        return _Rotation.apply(t, freqs)
    return _megatron_rotary(t, freqs, config, cu_seqlens, mscale, **arguments)
