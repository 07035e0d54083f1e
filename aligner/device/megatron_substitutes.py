"""Substitutes for parts of megatron-core that need Transformer Engine, Apex or a CUDA stream.

`aligner.device.accelerator.prepare_megatron` applies them if the originals are absent.
"""

from typing import Any

import torch
from torch import Tensor


def define_router_gemm() -> None:
    """Define a name of Transformer Engine that megatron-core's router reads in any case."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router's value for an absent kernel


def fuse_gradient_norm() -> None:
    """Make megatron-core compute gradient norms without one host copy per parameter."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    def norm_on_device(
        chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
    ) -> tuple[Tensor, None]:
        del chunk_size, overflow, per_tensor  # arguments of the fused kernel
        return torch.nn.utils.get_total_norm(tensor_lists[0], foreach=True).float().view(1), None

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_on_device


def free_dispatcher_of_stream() -> None:
    """Make megatron-core's dispatcher of tokens to experts work without a CUDA stream."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def list_counts(
        self: Any, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        if point == "before_ep_alltoall" and self.input_splits is not None:
            self.input_splits = self.input_splits.tolist()
            self.output_splits = self.output_splits.tolist()
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # never used
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = list_counts
