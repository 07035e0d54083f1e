"""Router of the experts of GLM-4.5 and DeepSeek-V3."""

import math

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from aligner.models.gpt.layers.fusions import GPTConfig


class SigmoidRouter(TopKRouter):
    """Selects experts by sigmoid scores plus a bias. Training does not change the bias.

    DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
    """

    def __init__(
        self, config: GPTConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.expert_bias = nn.Parameter(bias, requires_grad=False)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute `sigmoid_routing`, [S * B, E], from float32 ``logits`` [S, B, E]."""
        assert padding_mask is None
        return sigmoid_routing(logits.flatten(0, -2), self.topk, self.expert_bias, self.config)


def sigmoid_routing(
    logits: Tensor, topk: int, bias: Tensor, config: GPTConfig
) -> tuple[Tensor, Tensor]:
    """Select ``topk`` experts for each token from float32 ``logits`` [n, E] and ``bias`` [E].

    Returns the weights of the experts, float32 [n, E], 0 for experts that are not selected, and
    whether an expert is selected, bool [n, E].
    """
    scores = logits.sigmoid()
    choice = scores.detach() + bias
    # Only experts of the groups with the largest sums of two scores can be selected.
    if config.moe_router_num_groups > 1:
        by_group = choice.unflatten(1, (config.moe_router_num_groups, -1))
        sums = by_group.topk(2, dim=-1).values.sum(-1)
        best = sums.topk(config.moe_router_group_topk, dim=-1).indices
        is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, True)
        choice = by_group.masked_fill(~is_best[..., None], -math.inf).flatten(1)
    # The bias has no part in the weights of the selected experts.
    selected = choice.topk(topk, dim=-1).indices
    weights = scores.gather(1, selected)
    if config.moe_router_normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * config.moe_router_topk_scaling_factor
    routed = torch.zeros_like(scores).scatter(1, selected, weights)
    return routed, torch.zeros_like(routed, dtype=torch.bool).scatter_(1, selected, True)
