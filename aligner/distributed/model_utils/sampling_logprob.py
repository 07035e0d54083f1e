"""Log-probs under top-k and top-p sampling, renormalised over the tokens kept.

Each rank sorts the whole rows of its share of the positions; only one limit per position comes
back, so the softmax and its gradient stay sharded over the vocabulary. The number of positions
need not be a multiple of the tensor-parallel size. All columns count: padding must be -inf.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.distributed.model_utils.logits_logprob import (
    LogprobPlan,
    logprob_backward,
    logprob_forward,
)
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams


def _plan(
    logits: Tensor,
    group: dist.ProcessGroup | None,
    top_k: int | None,
    top_p: float,
    chunk_size: int | None,
) -> LogprobPlan:
    width = logits.shape[-1]
    start = 0 if group is None else width * dist.get_rank(group)
    shard = VocabShard.between(start, start + width, group)
    return LogprobPlan(shard, chunk_size, TrainingSamplingParams(top_k=top_k, top_p=top_p))


class DistributedLogprobWithSampling(torch.autograd.Function):
    """Log-probs of the distribution that top-k and top-p leave; the chunk chosen by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: dist.ProcessGroup,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        """Log-probs float32 [B, S] (float64 for float64 logits).

        ``vocab_parallel_logits``: float [B, S, V_local], rank r holding the r-th part of the
        vocabulary. ``target``: int64 [B, S], already shifted, global ids; -inf where it is outside
        the filter. ``top_k`` (None, 0 or -1: off), then ``top_p`` (1: off) over what it leaves;
        equal logits are kept or left out together. ``inference_only``: keep nothing for backward.

        Raises:
            ConfigError: ``top_k`` below -1 or ``top_p`` outside (0, 1].
        """
        plan = _plan(vocab_parallel_logits, tp_group, top_k, top_p, None)
        indices = target.unsqueeze(-1)
        return logprob_forward(ctx, vocab_parallel_logits, indices, plan, inference_only).squeeze(
            -1
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the local logits, float [B, S, V_local], from the log-probs' [B, S].

        It is exact for a fixed set of kept tokens and 0 outside it.
        """
        grad = logprob_backward(ctx, grad_outputs[0].unsqueeze(-1))
        return grad, None, None, None, None, None


class ChunkedDistributedLogprobWithSampling(torch.autograd.Function):
    """`DistributedLogprobWithSampling` with the number of positions per step given."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: dist.ProcessGroup,
        top_k: int | None,
        top_p: float,
        chunk_size: int,
        inference_only: bool = False,
    ) -> Tensor:
        """As `DistributedLogprobWithSampling.forward`; ``chunk_size`` positions at a time."""
        plan = _plan(vocab_parallel_logits, tp_group, top_k, top_p, chunk_size)
        indices = target.unsqueeze(-1)
        return logprob_forward(ctx, vocab_parallel_logits, indices, plan, inference_only).squeeze(
            -1
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the local logits, float [B, S, V_local], from the log-probs' [B, S].

        It is exact for a fixed set of kept tokens and 0 outside it.
        """
        grad = logprob_backward(ctx, grad_outputs[0].unsqueeze(-1))
        return grad, None, None, None, None, None, None
