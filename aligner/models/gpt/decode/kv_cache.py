"""Keys and values of the sequences in flight, one slot per sequence.

The cache is attached to every `CoreAttention` of a model (`CoreAttention.cache`) and does the
attention while it is. Before each forward pass it is set to the kind of pass: a prefill of several
prompts, or one more token for each of the first ``n`` slots. What may be seen comes from lengths,
never from token ids.

Shape legend: ``n`` rows of a pass, one token each; ``m`` prompts, ``P`` their padded length, ``G``
key-value heads of this rank, ``R`` query heads per key-value head, ``D`` head width, ``C`` capacity
in tokens. ``heads`` are [n, G, R + 2, D]: a key-value head's queries, its key, its value.

Results of a row do not depend on the other rows or on padding, bit for bit on the CPUs tried, as
long as lengths are padded to multiples of `ALIGNMENT`: a sum over masked positions then ends in
whole vectors of zeros. That is why decoding uses batched products rather than
`scaled_dot_product_attention`, which divides its work by the size of the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.device import accelerator
from aligner.models.gpt.layers.attention import attend, window_mask

ALIGNMENT = 16
# torch multiplies matrices whose three sizes have a smaller product in a way of its own.
_SMALL_PRODUCT = 400
_MOST_INT32 = 2**31 - 1


def aligned(length: int) -> int:
    """``length`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Prefill:
    """Prompts pass, one row per token, prompt after prompt.

    ``frame`` int64 [m, P]: the row of each prompt's token (any row in padding). ``rows`` int64 [n]:
    the place of each row in the flattened frame. ``sources`` int64 [k]: rows whose key and value
    are kept, ``places`` int64 [k * G, 2]: the rows of the flat cache they go to.
    """

    frame: Tensor
    rows: Tensor
    sources: Tensor
    places: Tensor


@dataclass(frozen=True)
class _Decode:
    """The first n slots take one token each and see up to ``span`` tokens.

    ``places`` int64 [n * G, 2]: rows of the flat cache for the new tokens. ``bias`` float
    [n * G, 1, span]: 0 where visible, -inf elsewhere. ``values`` int32 [n * G * R * span]: query by
    query the rows whose values it mixes, and ``starts`` int32 [n * G * R] where each begins there;
    None where mixing is a product.
    """

    places: Tensor
    span: int
    bias: Tensor
    values: Tensor | None
    starts: Tensor | None


class KVCache:
    """Keys and values of every layer on this process.

    A layer's store is [2 * slots * G * C, D]: the keys of all slots, then the values. Side by side
    in one row, products on either would run at half the speed, for they are bound by memory.
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
        window: int | None = None,
    ) -> None:
        """Allocate.

        Args:
            layer_numbers: megatron-core's global numbers of the layers on this process.
            num_slots: most sequences in flight.
            capacity: most tokens per sequence.
            groups: key-value heads of this rank.
            queries: query heads of each of them.
            head_dim: width of a head.
            dtype: of keys and values.
            device: where they live.
            window: tokens seen by sliding-window attention, the current one included; None: all.
        """
        # Narrow heads see some masked positions more, so that all spans are computed alike.
        self._least_span = aligned(-(-_SMALL_PRODUCT // head_dim))
        self._capacity = max(aligned(capacity), self._least_span)
        rows = num_slots * groups * self._capacity  # of the keys, and of the values
        shape = (2 * rows, head_dim)
        # Zeros: a masked position's value is multiplied by 0, which would not undo a NaN.
        self._stores = {n: torch.zeros(shape, dtype=dtype, device=device) for n in layer_numbers}
        # What every pass needs: where each slot's and head's keys and values begin, [slots * G, 2].
        first_keys = torch.arange(0, rows, self._capacity, device=device)
        self._firsts = torch.stack((first_keys, first_keys + rows), dim=1)
        self._columns = torch.arange(self._capacity, device=device)
        self._seen = torch.zeros((), dtype=dtype, device=device)
        self._unseen = torch.full((), -torch.inf, dtype=dtype, device=device)
        self._scale = 1.0 / math.sqrt(head_dim)
        self._window = window
        self._groups, self._queries = groups, queries
        # FBGEMM's sum of weighted rows, which torch calls for an embedding bag.
        fbgemm = device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines
        self._mixes_rows = fbgemm and dtype == torch.float32 and 2 * rows <= _MOST_INT32
        # Scores that a product writes in bfloat16 are rounded; inside this kernel they are not.
        self._fused = device.type != "cpu" and dtype == torch.bfloat16
        self._pass: _Prefill | _Decode | None = None

    @property
    def capacity(self) -> int:
        """Most tokens per sequence."""
        return self._capacity

    def holds(self, num_slots: int, capacity: int) -> bool:
        """Return whether there are so many slots of so many tokens."""
        return len(self._firsts) >= num_slots * self._groups and self._capacity >= capacity

    @property
    def nbytes(self) -> int:
        """Size of all layers' keys and values."""
        return sum(store.nbytes for store in self._stores.values())

    def begin_prefill(
        self, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> None:
        """The next forward pass is over prompts; prompt ``sources[i]`` fills ``slots[i]``.

        Several slots may take the same prompt (samples of one prompt). The places are found on the
        host, which does not wait for the device.

        Args:
            lengths: [m] of the prompts.
            slots: [k].
            sources: [k].
        """
        width = aligned(max(lengths))
        ends = torch.tensor(lengths)
        starts = ends.cumsum(0) - ends
        column = torch.arange(width)
        inside = column < ends[:, None]
        frame = torch.where(inside, starts[:, None] + column, 0)
        taken = torch.tensor(sources)
        kept = inside[taken]
        slot = torch.tensor(slots)[:, None].expand_as(kept)[kept]
        here = partial(accelerator.to_device, where=self._columns.device)
        self._pass = _Prefill(
            here(frame),
            here(inside.flatten().nonzero().squeeze(1)),
            here(frame[taken][kept]),
            self._places(here(slot), here(column.expand_as(kept)[kept])),
        )

    def begin_decode(self, positions: Tensor, longest: int) -> None:
        """The next forward pass adds the token at ``positions[i]`` to slot i.

        Args:
            positions: int64 [n], tokens that slot i holds already.
            longest: ``positions.max() + 1``, known to the caller without asking the device.
        """
        span = max(aligned(longest), self._least_span)
        by_group = positions.repeat_interleave(self._groups)[:, None]  # [n * G, 1]
        index = self._columns[:span]
        visible = index <= by_group
        if self._window is not None:
            visible &= index > by_group - self._window
        firsts = self._firsts[: by_group.shape[0]]
        values = starts = None
        if self._mixes_rows:
            rows = (firsts[:, 1:] + index).int()
            values = rows.repeat_interleave(self._queries, dim=0).flatten()
            starts = torch.arange(0, len(values), span, dtype=torch.int32, device=positions.device)
        self._pass = _Decode(
            firsts + by_group,
            span,
            torch.where(visible, self._seen, self._unseen)[:, None],
            values,
            starts,
        )

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of slots ``source`` int64 [k] to slots ``target``."""
        for store in self._stores.values():
            slots = store.view(2, -1, self._groups, self._capacity, store.shape[1])
            slots[:, target, :, :length] = slots[:, source, :, :length]

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value and attend over everything the query may see.

        Args:
            layer_number: megatron-core's global number of the layer.
            query: float ``[P or 1, m, G * R, D]``, rotary embedding applied; right-padded prompts
                or one token for each of the first m slots.
            key: ``[P or 1, m, G, D]``.
            value: ``[P or 1, m, G, D]``.

        Returns:
            ``[P or 1, m, G * R * D]``.
        """
        length, batch, groups, width = key.shape
        by_group = query.reshape(length, batch, groups, -1, width)
        heads = torch.cat((by_group, key[:, :, :, None], value[:, :, :, None]), dim=3)
        heads = heads.transpose(0, 1).flatten(0, 1)
        if isinstance(self._pass, _Prefill):
            attended = heads.new_zeros(heads.shape[0], query.shape[2] * width)
            attended[self._pass.rows] = self.attend_rows(layer_number, heads[self._pass.rows])
        else:
            attended = self.attend_rows(layer_number, heads)
        return attended.view(batch, length, -1).transpose(0, 1)

    def attend_rows(self, layer_number: int, heads: Tensor) -> Tensor:
        """`attend` on rows: ``heads`` float [n, G, R + 2, D], contiguous, to [n, G * R * D]."""
        plan = self._pass
        assert plan is not None
        store = self._stores[layer_number]
        if isinstance(plan, _Prefill):
            store[plan.places] = heads[:, :, -2:][plan.sources].flatten(0, 1)
            return self._prefill(plan, heads)
        rows, groups, count, width = heads.shape
        by_group = heads.view(rows * groups, count, width)
        store[plan.places] = by_group[:, -2:]
        # [n * G, R, D] against views [n * G, span, D]: nothing is repeated for grouped queries.
        by_slot = store.view(2, -1, self._capacity, width)[:, : rows * groups, : plan.span]
        keys, values = by_slot.unbind()
        if self._fused:  # a key-value head's queries stand where a sequence's positions would
            attended = F.scaled_dot_product_attention(
                by_group[:, None, :-2],
                keys[:, None],
                values[:, None],
                attn_mask=plan.bias[:, None],
                scale=self._scale,
            )
            return attended.reshape(rows, -1)
        scores = torch.baddbmm(plan.bias, by_group[:, :-2], keys.transpose(1, 2), alpha=self._scale)
        shares = scores.softmax(dim=-1)
        if plan.values is None:
            return torch.bmm(shares, values).view(rows, -1)
        # A product with so few rows reads the values at a third of the speed of this sum of rows.
        mixed = torch.embedding_bag(
            store, plan.values, plan.starts, mode=0, per_sample_weights=shares.flatten()
        )
        return mixed[0].view(rows, -1)

    def _prefill(self, plan: _Prefill, heads: Tensor) -> Tensor:
        framed = heads[plan.frame]  # [m, P, G, R + 2, D]
        query, key, value = framed.split((heads.shape[2] - 2, 1, 1), dim=3)
        length = framed.shape[1]
        windowed = self._window is not None and length > self._window
        out = attend(
            query.flatten(2, 3).transpose(1, 2),
            key.squeeze(3).transpose(1, 2),
            value.squeeze(3).transpose(1, 2),
            window_mask(length, self._window, heads.device) if windowed else None,
            self._scale,
        )
        return out.transpose(1, 2).flatten(0, 1)[plan.rows].flatten(1)

    def _places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Places of all heads' keys and values of tokens, int64 [k] each: int64 [k * G, 2]."""
        firsts = self._firsts.view(-1, self._groups, 2)[slots]
        return (firsts + positions[:, None, None]).flatten(0, 1)
