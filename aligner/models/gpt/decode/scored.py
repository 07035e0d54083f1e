"""Decoding of models with soft caps."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.logprobs.output_layer import soft_cap_
from aligner.models.gpt.decode.kv_cache import KVCache, Prefill
from aligner.models.gpt.decode.model import IncrementalModel
from aligner.models.gpt.layers.scored_attention import ScoredAttention


class ScoredCache(KVCache):
    """`KVCache` of layers that attend by `ScoredAttention`."""

    layers: Sequence[ScoredAttention] = ()  # of this process

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `KVCache.attend`."""
        plan, store = self._pass, self._stores[layer_number]
        assert plan is not None
        layer = next(layer for layer in self.layers if layer.layer_number == layer_number)
        _, batch, groups, width = key.shape
        # Keys and values of each row, [n, G, 2, D]. A prompt has rows for its padding, too.
        heads = torch.stack((key, value), dim=3).transpose(0, 1).flatten(0, 1)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if isinstance(plan, Prefill):
            store[plan.targets] = heads[plan.rows][plan.sources].flatten(0, 1)
            out = layer.attend_rows(query, key, value)
        else:
            store[plan.targets] = heads.flatten(0, 1)
            shape = 2, -1, groups, self.capacity, width
            keys, values = store.view(shape)[:, :batch, :, : plan.span].unbind()
            seen = plan.bias[layer.window].view(batch, groups, 1, -1)[:, :1] == 0
            out = layer.attend(query, keys, values, seen)
        return out.permute(2, 0, 1, 3).flatten(2)


class ScoredModel(IncrementalModel):
    """`IncrementalModel` with soft caps of scores and logits."""

    cache_type = ScoredCache

    def __init__(
        self, gpt: GPTModel, architecture: GPTArchitecture, num_slots: int, capacity: int
    ) -> None:
        super().__init__(gpt, architecture, num_slots, capacity)
        self._cap = architecture.logits_cap
        assert isinstance(self.cache, ScoredCache)
        self.cache.layers = [m for m in self._attention if isinstance(m, ScoredAttention)]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `IncrementalModel.logits`."""
        return soft_cap_(super().logits(hidden), self._cap)
