"""Token-by-token decoding with an unsharded causal language model of transformers.

A decoder keeps sequences in numbered slots and has the methods of `decode.model.IncrementalModel`.
`choose_decoder` returns the first of `SlotDecoder`, `GroupDecoder` and `FullPassDecoder` (fastest
first) whose logits are right for the model.

Shapes: ``n`` rows of a pass, ``m`` prompts, ``P`` padded length of the prompts, ``V`` vocabulary.
"""

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from aligner.device import accelerator
from aligner.kernels.linear_product import Product, has_wide_products, wide_mm
from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.decode.model import DecodingModel
from aligner.models.gpt.decode.sampling import SampledTokens
from aligner.models.gpt.dtensor.attention import NAME, register, running
from aligner.models.gpt.layers.segments import Bucket


class TransformersDecoder(DecodingModel):
    """Base class of the decoders. Every sequence has one slot.

    `prefill` and `decode` return logits, [m, V] and [n, V], where `DecodingModel` returns hidden
    states, because transformers' models scale or cap their logits themselves.
    """

    description: ClassVar[str]  # description of the cache, for reports
    can_be_captured = False
    can_be_kept = False

    def __init__(self, model: nn.Module, num_slots: int, capacity: int) -> None:
        """Create the decoder for ``num_slots`` sequences of at most ``capacity`` tokens."""
        self.model = model
        self.num_slots = num_slots
        self.capacity = aligned(capacity)
        self.device = next(model.parameters()).device
        self._last = torch.empty(0)  # argument ``last`` of the current `run`

    def index(self, values: Sequence[int]) -> Tensor:
        """Return ``values`` as an int64 tensor [n] on the device, without synchronising."""
        return accelerator.to_device(torch.tensor(values), where=self.device)

    @property
    def cache(self) -> Self:
        """Object that stores the sequences: the decoder itself."""
        return self

    @property
    def stages(self) -> Self:
        """Object that communicates between pipeline stages: the decoder itself, the only stage."""
        return self

    def sampled_by_last(
        self, count: int, sample: Callable[[], SampledTokens], record: int = 0
    ) -> SampledTokens:
        """See `PipelineComm.sampled_by_last`."""
        del count, record
        return sample()

    def fits(self, num_slots: int, capacity: int) -> bool:
        """Return whether the decoder has ``num_slots`` slots of ``capacity`` tokens, or more."""
        return self.num_slots >= num_slots and self.capacity >= capacity

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Enable `prefill` and `decode` inside the block. The weights must not change there."""
        was_training = self.model.training
        head = self.model.get_output_embeddings()
        linears = [module for module in self.model.modules() if type(module) is nn.Linear]
        self.model.eval()
        try:
            for linear in linears:
                linear.forward = partial(Product(linear.weight), bias=linear.bias)
            if head is not None:
                head.forward = partial(self._project, head, head.forward)
            with torch.inference_mode():
                yield
        finally:
            for module in {*linears, head} - {None}:
                del module.forward  # restores the method of the class
            self.model.train(was_training)

    def _project(
        self, head: nn.Module, plain: Callable[[Tensor], Tensor], hidden: Tensor
    ) -> Tensor:
        """Compute the head's output [n, 1, V] at index ``_last`` of each row of [n, P, H]."""
        hidden = hidden[torch.arange(len(hidden), device=self.device), self._last]
        if type(head) is not nn.Linear or not has_wide_products(hidden, head.weight):
            return plain(hidden)[:, None]
        logits = wide_mm(hidden, head.weight.t())
        return (logits if head.bias is None else logits + head.bias)[:, None]

    def run(self, tokens: Tensor, last: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run the model on ``tokens``, int64 [n, P], inside a session.

        ``last``: int64 [n], index of the token in each row whose successor is predicted. Returns
        the logits of the successors, float [n, V], and the model's output object.
        """
        self._last = last
        output = self.model(input_ids=tokens, **inputs)
        logits = output.logits
        if logits.shape[1] == 1:
            return logits[:, 0], output
        # The model has no module for its output layer, or does not call it.
        return logits[torch.arange(len(last), device=self.device), last], output

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` [n, V], which are logits already (see `TransformersDecoder`)."""
        return hidden

    @abstractmethod
    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of slots ``source``, int64 [k], to slots ``target``.

        ``length``: length of the copied prompts, or of complete sequences.
        """


class FullPassDecoder(TransformersDecoder):
    """Decoder without a cache. Each step runs the model on all tokens, right-padded."""

    description = "without a cache"

    def __init__(self, model: nn.Module, num_slots: int, capacity: int) -> None:
        super().__init__(model, num_slots, capacity)
        self._tokens = torch.zeros(num_slots, self.capacity, dtype=torch.int64, device=self.device)

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """See `DecodingModel`. ``tokens``: int64 [n, P]."""
        tokens = tokens.to(self.device)
        self._tokens[self.index(slots), : tokens.shape[1]] = tokens[self.index(sources)]
        return self.run(tokens, self.index(lengths) - 1, use_cache=False)[0]

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """See `DecodingModel`. ``tokens``, ``positions``: int64 [n]."""
        rows = torch.arange(len(tokens), device=self.device)
        self._tokens[rows, positions] = tokens
        sequences = self._tokens[: len(tokens), :longest]
        return self.run(sequences, positions, use_cache=False)[0]

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """See `TransformersDecoder.copy`."""
        self._tokens[target, :length] = self._tokens[source, :length]


@dataclass
class _Group:
    """Sequences of equal length, stored as the rows of one transformers cache."""

    name: str  # name of the model's argument for the cache
    cache: Any
    rows: int
    length: int


_CACHE_NAMES = ("past_key_values", "cache_params", "state")
_Place = tuple[_Group, int]  # position of a sequence: a group, and a row in it


class GroupDecoder(TransformersDecoder):
    """Decoder with transformers' caches, whatever state they contain.

    Each step runs one forward pass for every distinct length. Copies of a slot share a row of a
    cache until their next step.
    """

    description = "with transformers' cache, sequences of equal length together"

    def __init__(self, model: nn.Module, num_slots: int, capacity: int) -> None:
        super().__init__(model, num_slots, capacity)
        self._places: list[_Place | None] = [None] * num_slots
        self._prompts: list[_Place | None] = [None] * num_slots  # cached prompts, without response

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """See `DecodingModel`. ``tokens``: int64 [n, P]."""
        results: dict[int, Tensor] = {}
        for length in sorted(set(lengths)):
            prompts = [index for index, size in enumerate(lengths) if size == length]
            group = _Group("", None, len(prompts), 0)
            logits = self._run(group, tokens[prompts, :length].to(self.device))
            results.update(zip(prompts, logits, strict=True))
            for slot, source in zip(slots, sources, strict=True):
                if source in prompts:
                    self._places[slot] = self._prompts[slot] = group, prompts.index(source)
        return torch.stack([results[index] for index in range(len(lengths))])

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """See `DecodingModel`. ``tokens``, ``positions``: int64 [n]."""
        # A copy of a sequence in flight that is longer than the target begins after the prompt.
        slots_of_length: dict[int, list[int]] = {}
        for slot, length in enumerate(positions.tolist()):
            slots_of_length.setdefault(length, []).append(slot)
            place = self._places[slot]
            if place is not None and place[0].length != length:
                self._places[slot] = self._prompts[slot]
        results: dict[int, Tensor] = {}
        for slots in slots_of_length.values():
            group = self._group_of([place for s in slots if (place := self._places[s])])
            for row, slot in enumerate(slots):
                self._places[slot] = group, row
            logits = self._run(group, tokens[slots, None])
            results.update(zip(slots, logits, strict=True))
        return torch.stack([results[slot] for slot in range(len(tokens))])

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """See `TransformersDecoder.copy`."""
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        moved = [(self._places[slot], self._prompts[slot]) for slot, _ in pairs]
        for (_, slot), places in zip(pairs, moved, strict=True):
            self._places[slot], self._prompts[slot] = places

    def _group_of(self, places: list[_Place]) -> _Group:
        # Reuse the group if its rows are ``places`` and no slot restarts from it as a prompt.
        first = places[0][0]
        in_place = [(first, row) for row in range(first.rows)] == places
        if in_place and not any(p is not None and p[0] is first for p in self._prompts):
            return first
        groups = list({id(group): group for group, _ in places}.values())
        parts = [self.index([row for group, row in places if group is part]) for part in groups]
        # Rows of the joined cache are in order of groups, then in order of places.
        joined = _select_rows([group.cache for group in groups], parts, [g.rows for g in groups])
        order = [i for part in groups for i, (group, _) in enumerate(places) if group is part]
        if order != sorted(order):
            inverse = self.index(order).argsort()
            joined = _select_rows([joined], [inverse], [len(places)])
        return _Group(first.name, joined, len(places), first.length)

    def _run(self, group: _Group, tokens: Tensor) -> Tensor:
        """Append int64 ``tokens`` [n, s] to n sequences. Returns the next token's logits [n, V]."""
        last = torch.full((tokens.shape[0],), tokens.shape[1] - 1, device=self.device)
        positions = torch.arange(group.length, group.length + tokens.shape[1], device=self.device)
        inputs = {"position_ids": positions.expand_as(tokens)}
        if group.cache is not None:
            inputs[group.name] = group.cache
        logits, output = self.run(tokens, last, use_cache=True, **inputs)
        group.length += tokens.shape[1]
        name = next(name for name in _CACHE_NAMES if getattr(output, name, None) is not None)
        group.name, group.cache = name, getattr(output, name)
        return logits


def _select_rows(parts: Sequence[Any], rows: Sequence[Tensor], counts: Sequence[int]) -> Any:
    """Concatenate the selected ``rows`` of several caches. ``counts``: rows in each cache."""
    first = parts[0]
    if isinstance(first, Tensor):
        if all(
            part.dim() and len(part) == count for part, count in zip(parts, counts, strict=True)
        ):
            return torch.cat([part[index] for part, index in zip(parts, rows, strict=True)])
        return first.clone()
    if type(first) is dict:
        return {name: _select_rows([part[name] for part in parts], rows, counts) for name in first}
    if type(first) in (list, tuple):
        items = zip(*parts, strict=True)
        return type(first)([_select_rows(item, rows, counts) for item in items])
    if type(first).__module__.startswith("transformers") and not isinstance(first, nn.Module):
        joined = copy.copy(first)
        vars(joined).update(_select_rows([vars(part) for part in parts], rows, counts))
        return joined
    return first


class SlotDecoder(TransformersDecoder):
    """Decoder with aligner's key-value cache. One pass decodes sequences of any lengths.

    The cache has keys and values of every attention call, [slots, G, C, D] each. ``G``: number of
    key-value heads, ``C``: capacity in tokens, ``D``: width of a key or value.
    """

    description = "with aligner's key-value cache"

    def __init__(self, model: nn.Module, num_slots: int, capacity: int) -> None:
        super().__init__(model, num_slots, capacity)
        # Keys and values of each attention call, allocated in the first pass. They begin as zeros,
        # because a masked value is multiplied by 0, which would not remove a NaN.
        self._stores: list[tuple[Tensor, Tensor]] = []
        # State of the current pass. In a prefill: the slots to fill, and the prompt of each slot.
        # In a decoding step: the positions of the tokens, in the bucket.
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
        """Store keys and values of an attention call, float [n, G, s, D] (see `Pass.store`)."""
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
