"""Keys and values of the sequences in flight, one slot per sequence.

The cache is attached to every `CoreAttention` of a model (`CoreAttention.cache`) and does the
attention while it is. Before each forward pass it is told what the pass is: a prefill of several
prompts, or one more token for each of the first ``n`` slots. What may be seen comes from lengths,
never from token ids.

Shape legend: ``n`` sequences of a pass, ``P`` padded prompt length, ``G`` key-value heads of this
rank, ``R`` query heads per key-value head, ``D`` head width, ``C`` capacity in tokens.

Results of a row do not depend on the other rows or on padding, bit for bit on the CPUs tried, as
long as lengths are padded to multiples of `ALIGNMENT`: a sum over masked positions then ends in
whole vectors of zeros. That is why decoding uses batched products rather than
`scaled_dot_product_attention`, which divides its work by the size of the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.gpt.attention import _window_mask

ALIGNMENT = 16
# torch multiplies matrices whose three sizes have a smaller product in a way of its own.
_SMALL_PRODUCT = 400


def aligned(length: int) -> int:
    """``length`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Prefill:
    """Prompts pass; the key-value rows ``sources`` int64 [m] go to ``slots`` int64 [m]."""

    slots: Tensor
    sources: Tensor


@dataclass(frozen=True)
class _Decode:
    """The first n slots take one token each and see up to ``span`` tokens.

    ``places`` int64 [n * G]: rows of the flat cache [slots * G * C, D] for the new tokens.
    ``bias`` float [n * G, 1, span]: 0 where visible, -inf elsewhere.
    """

    places: Tensor
    span: int
    bias: Tensor


class KVCache:
    """Keys and values ``[slots, G, C, D]`` of every layer on this process."""

    def __init__(
        self,
        layer_numbers: Sequence[int],
        num_slots: int,
        capacity: int,
        *,
        groups: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        """Allocate.

        Args:
            layer_numbers: megatron-core's global numbers of the layers on this process.
            num_slots: most sequences in flight.
            capacity: most tokens per sequence.
            groups: key-value heads of this rank.
            head_dim: width of a head.
            dtype: of keys and values.
            device: where they live.
            window: tokens seen by sliding-window attention, the current one included; None: all.
        """
        # Narrow heads see some masked positions more, so that all spans are computed alike.
        self._least_span = aligned(-(-_SMALL_PRODUCT // head_dim))
        self._capacity = max(aligned(capacity), self._least_span)
        shape = (num_slots, groups, self._capacity, head_dim)
        # Zeros: a masked position's value is multiplied by 0, which would not undo a NaN.
        self._keys = {n: torch.zeros(shape, dtype=dtype, device=device) for n in layer_numbers}
        self._values = {n: torch.zeros(shape, dtype=dtype, device=device) for n in layer_numbers}
        self._scale = 1.0 / math.sqrt(head_dim)
        self._window = window
        self._groups = groups
        self._pass: _Prefill | _Decode | None = None

    def begin_prefill(self, slots: Tensor, sources: Tensor) -> None:
        """The next forward pass is over prompts; row ``sources[i]`` of it fills ``slots[i]``.

        Several slots may take the same row (samples of one prompt).
        """
        self._pass = _Prefill(slots, sources)

    def begin_decode(self, positions: Tensor, longest: int) -> None:
        """The next forward pass adds the token at ``positions[i]`` to slot i.

        Args:
            positions: int64 [n], tokens that slot i holds already.
            longest: ``positions.max() + 1``, known to the caller without asking the device.
        """
        span = max(aligned(longest), self._least_span)
        index = torch.arange(span, device=positions.device)
        visible = index <= positions[:, None]
        if self._window is not None:
            visible &= index > positions[:, None] - self._window
        dtype = next(iter(self._keys.values())).dtype
        bias = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
        bias.masked_fill_(~visible, -torch.inf)
        heads = torch.arange(positions.shape[0] * self._groups, device=positions.device)
        self._pass = _Decode(
            heads * self._capacity + positions.repeat_interleave(self._groups),
            span,
            bias.repeat_interleave(self._groups, dim=0)[:, None],
        )

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of slots ``source`` int64 [m] to slots ``target``."""
        for store in (*self._keys.values(), *self._values.values()):
            store[target, :, :length] = store[source, :, :length]

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value and attend over everything the query may see.

        Args:
            layer_number: megatron-core's global number of the layer.
            query: ``[P or 1, n, G * R, D]``, rotary embedding applied.
            key: ``[P or 1, n, G, D]``.
            value: ``[P or 1, n, G, D]``.

        Returns:
            ``[P or 1, n, G * R * D]``.
        """
        if isinstance(self._pass, _Prefill):
            return self._prefill(self._pass, layer_number, query, key, value)
        head_dim = query.shape[3]
        heads = key.shape[1] * self._groups
        # [n * G, R, D] against views [n * G, span, D]: nothing is repeated for grouped queries.
        attended = self.decode(
            layer_number,
            query.reshape(heads, -1, head_dim),
            key.reshape(heads, head_dim),
            value.reshape(heads, head_dim),
        )
        return attended.view(1, query.shape[1], -1)

    def decode(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`attend` for one token per slot, with the heads in one dimension.

        Args:
            layer_number: megatron-core's global number of the layer.
            query: ``[n * G, R, D]``.
            key: ``[n * G, D]``.
            value: ``[n * G, D]``.

        Returns:
            ``[n * G, R, D]``.
        """
        plan = self._pass
        assert isinstance(plan, _Decode)
        head_dim = key.shape[1]
        stored = []
        for cache, new in ((self._keys, key), (self._values, value)):
            flat = cache[layer_number].view(-1, head_dim)
            flat.index_copy_(0, plan.places, new)
            by_head = flat.view(-1, self._capacity, head_dim)
            stored.append(by_head[: key.shape[0], : plan.span])
        scores = torch.baddbmm(plan.bias, query, stored[0].transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(dim=-1), stored[1])

    def _prefill(
        self, plan: _Prefill, layer_number: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        length, rows = query.shape[:2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        self._keys[layer_number][plan.slots, :, :length] = k[plan.sources]
        self._values[layer_number][plan.slots, :, :length] = v[plan.sources]
        windowed = self._window is not None and length > self._window
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_window_mask(length, self._window, q.device) if windowed else None,
            is_causal=not windowed,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(length, rows, -1)
