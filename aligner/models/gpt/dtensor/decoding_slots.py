"""Incremental decoding of a transformers model on our own key-value cache.

The model runs without a cache of its own. Our attention function, registered with transformers,
stores the keys and values of every attention call in one slot per sequence, and attends to all of
them. Our mask function keeps the model's own rule for each kind of layer (full, window, chunk),
which is applied to positions. Sequences of different lengths are therefore decoded in one pass.

Shape legend: ``n`` rows of a pass, ``s`` tokens of a row, ``C`` capacity in tokens, ``G`` key-value
heads, ``R`` query heads per key-value head, ``D`` and ``D_v`` widths of keys and values.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.dtensor.decoding import TransformersDecoder

NAME = "aligner_decoding"  # of the attention function


class _Rule:
    """Mask object that transformers hands through the layers: which positions see which.

    ``function(batch, head, query, key)`` returns a bool tensor for indices that broadcast.
    """

    dtype = torch.bool  # read by some models

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.seen: Tensor | None = None  # bool [n or 1, 1, queries, keys] in this pass


_DECODER: contextvars.ContextVar["SlotDecoder"] = contextvars.ContextVar("decoder")


class SlotDecoder(TransformersDecoder):
    """Keys and values of every attention call: [slots, G, C, D] and [slots, G, C, D_v]."""

    description = "with aligner's cache"

    def __init__(self, model: nn.Module, num_slots: int, capacity: int) -> None:
        """See `TransformersDecoder`."""
        super().__init__(model, num_slots, capacity)
        self._stores: list[tuple[Tensor, Tensor]] = []  # by attention call, from the first pass on
        self._calls = 0  # of this pass
        self._columns = torch.arange(self.capacity, device=self.device)
        # Of this pass: positions of its tokens int64 [n, s], slots and prompts that they fill.
        self._positions = torch.empty(0)
        self._slots, self._sources = torch.empty(0), torch.empty(0)
        self._span = 0
        self._is_prefill = False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `TransformersDecoder.session`. Selects our attention function inside the block."""
        register()
        configs = {id(c): c for m in self.model.modules() if (c := getattr(m, "config", None))}
        names = {key: config._attn_implementation for key, config in configs.items()}
        token = _DECODER.set(self)
        try:
            for config in configs.values():
                config._attn_implementation = NAME
            with super().session():
                yield
        finally:
            _DECODER.reset(token)
            for key, config in configs.items():
                config._attn_implementation = names[key]

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """See `TransformersDecoder.prefill`."""
        self._is_prefill, self._span = True, tokens.shape[1]
        self._slots, self._sources = self.index(slots), self.index(sources)
        self._positions = self._columns[None, : tokens.shape[1]].expand_as(tokens)
        return self._run(tokens.to(self.device), self.index(lengths) - 1)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """See `TransformersDecoder.decode`."""
        self._is_prefill, self._span = False, aligned(longest)
        self._slots = self._columns.new_tensor(range(len(tokens)))
        self._positions = positions[:, None]
        return self._run(tokens[:, None], torch.zeros_like(tokens))

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """See `TransformersDecoder.copy`."""
        for stores in self._stores:
            for store in stores:
                store[target, :, :length] = store[source, :, :length]

    def _run(self, tokens: Tensor, last: Tensor) -> Tensor:
        self._calls = 0
        inputs = {
            "position_ids": self._positions,
            # Without a mask, transformers would look for packed sequences in the positions.
            "attention_mask": torch.ones_like(tokens),
            "use_cache": False,
        }
        return self.run(tokens, last, **inputs)[0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: _Rule,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store the keys and values of an attention call, and attend to all of them.

        Args:
            query: float [n, G * R, s, D].
            key: float [n, G, s, D].
            value: float [n, G, s, D_v].
            rule: rule of this kind of layer.
            scale: factor of the scores.
            softcap: bound of the scores, ``softcap * tanh(score / softcap)``.
            sinks: float [G * R], one more score of every query, without a value.

        Returns:
            float [n, G * R, s, D_v].
        """
        if self._calls == len(self._stores):
            shape = self.num_slots, key.shape[1], self.capacity
            stores = key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3])
            self._stores.append(stores)
        keys, values = self._stores[self._calls]
        self._calls += 1
        if self._is_prefill:
            keys[self._slots, :, : self._span] = key[self._sources]
            values[self._slots, :, : self._span] = value[self._sources]
        else:
            positions = self._positions[:, 0]
            keys[self._slots, :, positions] = key[:, :, 0]
            values[self._slots, :, positions] = value[:, :, 0]
            key = keys[: len(query), :, : self._span]
            value = values[: len(query), :, : self._span]
        return _mix(query, key, value, self._seen(rule), scale, softcap, sinks)

    def _seen(self, rule: _Rule) -> Tensor:
        """Return which of the keys the queries of this pass see, bool [n or 1, 1, s, keys]."""
        if rule.seen is None:
            queries = self._positions[: 1 if self._is_prefill else None, None, :, None]
            keys = self._columns[None, None, None, : self._span]
            rows = torch.arange(len(queries), device=self.device)[:, None, None, None]
            seen = rule.function(rows, torch.zeros_like(rows[:1]), queries, keys)
            rule.seen = seen & (keys <= queries)
        return rule.seen


def _mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with float32 probabilities, see `SlotDecoder.attend`."""
    rows, heads, length, _ = query.shape
    groups = key.shape[1]
    by_group = query.reshape(rows, groups, -1, query.shape[3])  # the R heads' queries in turn
    scores = by_group @ key.transpose(2, 3)
    scores = scores.reshape(rows, groups, -1, length, key.shape[2]).float()
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, groups, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return (shares.flatten(2, 3) @ value).reshape(rows, heads, length, value.shape[3])


_KNOWN = {
    "position_ids",
    "sliding_window",
    "use_cache",
    "output_router_logits",
    "output_attentions",
}


def register() -> None:
    """Register the attention and the mask function with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*, mask_function: Callable[..., Tensor], **unused: Any) -> _Rule:
    """Return the rule of a kind of layer, with the signature that transformers requires."""
    del unused
    return _Rule(mask_function)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Rule,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of a decoding pass, with the signature that transformers requires."""
    unknown = {name for name, value in others.items() if value is not None} - _KNOWN
    if unknown or not isinstance(attention_mask, _Rule):
        raise TypeError(f"{type(module).__name__} passes {sorted(unknown)} to its attention")
    del dropout
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixed = _DECODER.get().attend(query, key, value, attention_mask, scale, softcap, s_aux)
    return mixed.transpose(1, 2).contiguous(), None
