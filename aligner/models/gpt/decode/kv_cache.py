"""Key-value cache of the sequences in flight, one slot per sequence.

Each forward pass is a prefill of prompts, or adds one token to each of the first ``n`` slots.

Shape legend: ``n`` rows of a pass, one token each, ``m`` prompts, ``P`` their padded length, ``G``
key-value heads of this rank, ``R`` query heads per key-value head, ``D`` head width. ``heads`` are
[n, G, R + 2, D]: a key-value head's queries, its key, its value.

The result of a row does not depend on other rows or padding, bit for bit on all tested CPUs, if
lengths are multiples of `ALIGNMENT`: a sum over masked positions then ends in full vectors of
zeros. Decoding uses batched matrix products, because a row's result in
`scaled_dot_product_attention` depends on the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.device import accelerator
from aligner.models.gpt.layers.dot_product import attend_rows

ALIGNMENT = 16
# torch computes matrix products with fewer multiplications by another algorithm.
_SMALL_PRODUCT = 400
_MAX_INT32 = 2**31 - 1


def aligned(length: int) -> int:
    """Round ``length`` up to a multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Prefill:
    """Plan of a forward pass over prompts. It has one row per token, prompt after prompt."""

    frame: Tensor  # int64 [m, P], row of each prompt's token (any row in padding)
    rows: Tensor  # int64 [n], index of each row in the flattened frame
    sources: Tensor  # int64 [k], rows whose key and value are stored
    targets: Tensor  # int64 [k * G, 2], rows of the flat cache for keys and values


@dataclass(frozen=True)
class _Decode:
    """Plan of a forward pass over one token for each of the first n slots."""

    targets: Tensor  # int64 [n * G, 2], rows of the flat cache for the new keys and values
    span: int  # number of cached positions that the pass reads
    # By size of the attention window: float [n * G, 1, span], 0 if visible, otherwise -inf.
    bias: dict[int | None, Tensor]
    # int32 [n * G * R * span], cache rows of each query's values, and int32 [n * G * R], start of
    # each query in ``values``. None: values are summed by a matrix product.
    values: Tensor | None
    starts: Tensor | None


class KVCache:
    """Keys and values of every layer on this process.

    A layer's store is [2 * slots * G * C, D] for a capacity of C tokens: the keys of all slots,
    then the values. Adjacent keys and values would halve the speed of the memory-bound products.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        num_slots: int,
        capacity: int,
        *,
        groups: int,
        queries: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float,
        windows: Sequence[int | None],
    ) -> None:
        """Allocate the cache for ``num_slots`` sequences of at most ``capacity`` tokens.

        ``layer_numbers``: megatron-core's global numbers of this process's layers. ``groups``: G.
        ``queries``: R. ``scale``: factor of the scores. ``windows``: tokens per layer (None: all).
        """
        # Products below `_SMALL_PRODUCT` round differently, so narrow heads get a longer span.
        self._min_span = aligned(-(-_SMALL_PRODUCT // head_dim))  # the quotient is rounded up
        self.capacity = max(aligned(capacity), self._min_span)
        rows = num_slots * groups * self.capacity  # of the keys, and of the values
        shape = (2 * rows, head_dim)
        # Not `empty`: values at masked positions are multiplied by 0, and 0 * NaN is NaN.
        self._stores = {n: torch.zeros(shape, dtype=dtype, device=device) for n in layer_numbers}
        # First row of each slot's and head's keys and values, [slots * G, 2].
        first_keys = torch.arange(0, rows, self.capacity, device=device)
        self._firsts = torch.stack((first_keys, first_keys + rows), dim=1)
        # Constants of the masks.
        self._columns = torch.arange(self.capacity, device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self._minus_inf = torch.full((), -torch.inf, dtype=dtype, device=device)
        self._scale = scale
        self._windows = dict(zip(layer_numbers, windows, strict=True))
        self._groups, self._queries = groups, queries
        # On a CPU with FBGEMM, `embedding_bag` computes weighted sums of values fastest.
        fbgemm = device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines
        self._uses_embedding_bag = fbgemm and dtype == torch.float32 and 2 * rows <= _MAX_INT32
        # The fused kernel keeps scores in float32. Separate products round them to bfloat16.
        self._fused = device.type != "cpu" and dtype == torch.bfloat16
        self._pass: Prefill | _Decode | None = None

    def fits(self, num_slots: int, capacity: int) -> bool:
        """Return whether the cache has at least ``num_slots`` slots of ``capacity`` tokens."""
        return len(self._firsts) >= num_slots * self._groups and self.capacity >= capacity

    @property
    def nbytes(self) -> int:
        """Size of all keys and values in bytes."""
        return sum(store.nbytes for store in self._stores.values())

    def begin_prefill(
        self, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> None:
        """Prepare for a forward pass that stores prompt ``sources[i]`` in slot ``slots[i]``.

        ``lengths``: [m], length of each prompt. Several slots can store the same prompt.
        """
        width = aligned(max(lengths))
        ends = torch.tensor(lengths)
        starts = ends.cumsum(0) - ends
        column = torch.arange(width)
        inside = column < ends[:, None]
        frame = torch.where(inside, starts[:, None] + column, 0)
        source = torch.tensor(sources)
        stored = inside[source]
        slot = torch.tensor(slots)[:, None].expand_as(stored)[stored]
        to_device = partial(accelerator.to_device, where=self._columns.device)
        # Rows of the flat cache: first row of the slot and head, plus the position.
        firsts = self._firsts.view(-1, self._groups, 2)[to_device(slot)]
        positions = to_device(column.expand_as(stored)[stored])
        self._pass = Prefill(
            to_device(frame),
            to_device(inside.flatten().nonzero().squeeze(1)),
            to_device(frame[source][stored]),
            (firsts + positions[:, None, None]).flatten(0, 1),
        )

    def begin_decode(self, positions: Tensor, longest: int) -> None:
        """Prepare for a forward pass that adds the token at ``positions[i]``, int64 [n], to slot i.

        ``longest``: ``positions.max() + 1``, which the caller knows without synchronising.
        """
        span = max(aligned(longest), self._min_span)
        by_group = positions.repeat_interleave(self._groups)[:, None]  # [n * G, 1]
        index = self._columns[:span]
        bias = {}
        for window in set(self._windows.values()):
            visible = index <= by_group
            if window is not None:
                visible &= index > by_group - window
            bias[window] = torch.where(visible, self._zero, self._minus_inf)[:, None]
        firsts = self._firsts[: by_group.shape[0]]
        # For the CPU kernel that sums rows: the value rows of every query.
        values = starts = None
        if self._uses_embedding_bag:
            rows = (firsts[:, 1:] + index).int()
            values = rows.repeat_interleave(self._queries, dim=0).flatten()
            starts = torch.arange(0, len(values), span, dtype=torch.int32, device=positions.device)
        self._pass = _Decode(firsts + by_group, span, bias, values, starts)

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of slots ``source`` int64 [k] to slots ``target``."""
        for store in self._stores.values():
            slots = store.view(2, -1, self._groups, self.capacity, store.shape[1])
            slots[:, target, :, :length] = slots[:, source, :, :length]

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, and compute attention, float ``[P or 1, m, G * R * D]``.

        ``query``: float ``[P or 1, m, G * R, D]``, rotary embedding applied: right-padded prompts,
        or one token for each of the first m slots. ``key``, ``value``: ``[P or 1, m, G, D]``.
        """
        length, batch, groups, width = key.shape
        by_group = query.reshape(length, batch, groups, -1, width)
        heads = torch.cat((by_group, key[:, :, :, None], value[:, :, :, None]), dim=3)
        heads = heads.transpose(0, 1).flatten(0, 1)
        if isinstance(self._pass, Prefill):
            attended = heads.new_zeros(heads.shape[0], query.shape[2] * width)
            attended[self._pass.rows] = self.attend_rows(layer_number, heads[self._pass.rows])
        else:
            attended = self.attend_rows(layer_number, heads)
        return attended.view(batch, length, -1).transpose(0, 1)

    def attend_rows(self, layer_number: int, heads: Tensor) -> Tensor:
        """Compute `attend` for n tokens. ``heads``: [n, G, R + 2, D]. Returns [n, G * R * D]."""
        plan = self._pass
        assert plan is not None
        store = self._stores[layer_number]
        if isinstance(plan, Prefill):
            store[plan.targets] = heads[:, :, -2:][plan.sources].flatten(0, 1)
            return self._prefill(plan, heads, self._windows[layer_number])
        bias = plan.bias[self._windows[layer_number]]
        rows, groups, count, width = heads.shape
        by_group = heads.view(rows * groups, count, width)
        store[plan.targets] = by_group[:, -2:]
        # Queries [n * G, R, D], keys and values as views [n * G, span, D], without repetition.
        by_slot = store.view(2, -1, self.capacity, width)[:, : rows * groups, : plan.span]
        keys, values = by_slot.unbind()
        if self._fused:  # one head per group, whose R queries take the place of query positions
            attended = F.scaled_dot_product_attention(
                by_group[:, None, :-2],
                keys[:, None],
                values[:, None],
                attn_mask=bias[:, None],
                scale=self._scale,
            )
            return attended.reshape(rows, -1)
        scores = torch.baddbmm(bias, by_group[:, :-2], keys.transpose(1, 2), alpha=self._scale)
        probabilities = scores.softmax(dim=-1)  # [n * G, R, span]
        if plan.values is None:
            return torch.bmm(probabilities, values).view(rows, -1)
        # This sum of rows reads the values three times as fast as a product of few rows.
        sums = torch.embedding_bag(
            store, plan.values, plan.starts, mode=0, per_sample_weights=probabilities.flatten()
        )
        return sums[0].view(rows, -1)

    def _prefill(self, plan: Prefill, heads: Tensor, window: int | None) -> Tensor:
        framed = heads[plan.frame]  # [m, P, G, R + 2, D]
        query, key, value = framed.split((heads.shape[2] - 2, 1, 1), dim=3)
        out = attend_rows(
            query.flatten(2, 3).transpose(1, 2),
            key.squeeze(3).transpose(1, 2),
            value.squeeze(3).transpose(1, 2),
            window,
            scale=self._scale,
        )
        return out.transpose(1, 2).flatten(0, 1)[plan.rows].flatten(1)
