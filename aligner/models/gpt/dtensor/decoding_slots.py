"""Incremental decoding of a transformers model on our own key-value cache.

Our attention (`attention`) stores the keys and values of every call in one slot per sequence.
Sequences of different lengths are decoded in one pass.

Shape legend: ``n`` rows of a pass, ``s`` tokens of a row, ``C`` capacity in tokens, ``G`` key-value
heads, ``D`` width of keys or of values.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.dtensor.attention import NAME, register, running
from aligner.models.gpt.dtensor.decoding import TransformersDecoder
from aligner.models.gpt.layers.segments import Bucket


class SlotDecoder(TransformersDecoder):
    """Keys and values of every attention call, [slots, G, C, D] each."""

    description = "with aligner's key-value cache"

    def __init__(self, model: nn.Module, num_slots: int, capacity: int) -> None:
        """See `TransformersDecoder`."""
        super().__init__(model, num_slots, capacity)
        # By number of the call, allocated in the first pass. Zeros: a masked value is multiplied
        # by 0, which would not remove a NaN.
        self._stores: list[tuple[Tensor, Tensor]] = []
        # Of this pass. In a prefill, the slots to fill and the prompts to fill them with. In a
        # step, the positions of the tokens.
        self._slots, self._sources = self.index(()), self.index(())
        self._bucket: Bucket | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `TransformersDecoder.session`."""
        register()
        own = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            with super().session():
                yield
        finally:
            self.model.set_attn_implementation(own)

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """See `DecodingModel`. ``tokens``: int64 [n, P]."""
        self._bucket = None
        self._slots, self._sources = self.index(slots), self.index(sources)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        return self._run(tokens.to(self.device), positions, self.index(lengths) - 1)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """See `DecodingModel`. ``tokens``, ``positions``: int64 [n]."""
        positions = positions[:, None]
        self._bucket = Bucket(len(tokens), 1, min(aligned(longest), self.capacity), positions)
        self._slots = torch.arange(len(tokens), device=self.device)
        return self._run(tokens[:, None], positions, torch.zeros_like(tokens))

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """See `TransformersDecoder.copy`."""
        for stores in self._stores:
            for store in stores:
                store[target, :, :length] = store[source, :, :length]

    def _run(self, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        # Without a mask, transformers would look for packed sequences in the positions.
        mask = torch.ones_like(tokens)
        with running(None) as current:
            current.store = self._store
            return self.run(
                tokens, last, position_ids=positions, attention_mask=mask, use_cache=False
            )[0]

    def _store(self, call: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Bucket | None]:
        """Store keys and values, float [n, G, s, D], see `Pass`."""
        if call == len(self._stores):
            shape = self.num_slots, key.shape[1], self.capacity
            stores = key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3])
            self._stores.append(stores)
        all_keys, all_values = self._stores[call]
        if self._bucket is None:
            all_keys[self._slots, :, : key.shape[2]] = key[self._sources]
            all_values[self._slots, :, : key.shape[2]] = value[self._sources]
            return key, value, None
        assert self._bucket.positions is not None
        positions = self._bucket.positions[:, 0]
        all_keys[self._slots, :, positions] = key[:, :, 0]
        all_values[self._slots, :, positions] = value[:, :, 0]
        rows, span = len(key), self._bucket.keys
        return all_keys[:rows, :, :span], all_values[:rows, :, :span], self._bucket
