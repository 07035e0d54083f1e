"""A batch: named columns of equal length, with methods to cut, join and reorder it."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from aligner.distributed import sharding
from aligner.distributed.sharding import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    dynamic_plan,
    packed_plan,
)
from aligner.errors import ConfigError, DataError
from aligner.types import PAD_VALUES

__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]

ColumnsT = TypeVar("ColumnsT")


class BatchedDataDict(UserDict[str, Any], Generic[ColumnsT]):
    """Columns by name; each is a tensor ``[B, ...]`` or a list of B objects.

    A shard made by `shard_by_batch_size` has further attributes (None elsewhere):

    ``elem_counts_per_gb``: its rows of each global batch, which follow each other.
    ``largest_counts_per_gb``: the rows of the shard that has most, of each global batch.
    ``micro_batch_indices``: [global batch][micro-batch] = [start, end), counted from the first
    row of that global batch; start == end in a micro-batch without rows.
    ``micro_batch_lengths``: [global batch][micro-batch], tokens: the width that the rows of a
    dynamic micro-batch are padded to, the sum of the padded lengths of a packed one; 0 without
    rows.
    """

    elem_counts_per_gb: list[int] | None = None
    largest_counts_per_gb: list[int] | None = None
    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, int | float] | None = None,
    ) -> Self:
        """Join batches row after row; tensors are right-padded in dimension 1 to the longest.

        ``pad_value_dict`` gives the padding value by column; where it names none, it is that of
        `aligner.types.PAD_VALUES`, or 0. A batch without rows adds none, whatever its width.
        """
        if not batches:
            raise DataError("from_batches needs at least one batch, got none")
        keys = list(batches[0])
        for number, batch in enumerate(batches):
            if set(batch) != set(keys):
                raise DataError(
                    f"batch {number} has columns {sorted(batch)}, batch 0 has {sorted(keys)}; "
                    "all batches must have the same columns"
                )
        pads = {**PAD_VALUES, **(pad_value_dict or {})}
        return cls({key: _join([b[key] for b in batches], pads.get(key, 0)) for key in keys})

    @property
    def size(self) -> int:
        """Number of rows, the same in every column."""
        lengths = {key: len(column) for key, column in self.data.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns of different lengths: {lengths}")
        return next(iter(lengths.values()), 0)

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> "list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]":
        """Give every shard its part of each run of ``batch_size`` rows (a global batch).

        So rank i sees its share of global batch 0, then of global batch 1, and so on. None as
        ``batch_size`` means one batch of all rows.

        Plain, a part is a contiguous run of rows, and all parts are of one size; with
        ``allow_uneven_shards`` the first shards get a row more where the rows do not divide, and
        some get none where they are too few.

        With one of the other arguments rows are chosen so that all shards get about as many
        tokens, whatever the number of rows, and micro-batches are formed: the same number on
        every shard. Returned are then the shards and ``sorted_indices``: for each row of the
        shards, one after the other, where it stood. ``results.reorder_data(sorted_indices)`` puts
        joined results back in order. ``allow_uneven_shards`` allows a last global batch of fewer
        rows.

        Raises:
            ConfigError: both modes at once, or an argument of theirs cannot work.
            DataError: rows do not divide, a column is missing, a row is over the token budget.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ConfigError(
                "dynamic_batching_args and sequence_packing_args are both given; a micro-batch is "
                "either padded or packed: give one of them"
            )
        total = self.size
        size = total if batch_size is None else batch_size
        _check_batches(total, size, shards, allow_uneven_shards)
        batches = sharding.global_batches(total, size)
        if dynamic_batching_args is not None:
            return self._planned_shards(
                dynamic_plan(self.data, dynamic_batching_args, batches, shards)
            )
        if sequence_packing_args is not None:
            return self._planned_shards(
                packed_plan(self.data, sequence_packing_args, batches, shards)
            )
        if not allow_uneven_shards:
            _check_even(size, shards)
        parts = [sharding.split_evenly(batch, shards) for batch in batches]
        return self._shards([[part[shard] for part in parts] for shard in range(shards)])

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict":
        """Part ``rank`` of ``chunks`` equal contiguous parts; refuses sizes that do not divide."""
        _check_even(self.size, chunks)
        if not 0 <= rank < chunks:
            raise DataError(f"chunk {rank} is outside 0..{chunks - 1}")
        step = self.size // chunks
        return self.slice(rank * step, (rank + 1) * step)

    def slice(self, start: int, end: int) -> "SlicedDataDict":
        """Rows ``start`` to ``end`` (excluded); tensors are views."""
        return SlicedDataDict({key: column[start:end] for key, column in self.data.items()})

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> "SlicedDataDict":
        """Rows of the ``batch_idx``-th batch of ``batch_size``; the last one may be shorter.

        None as ``batch_size`` means a shard's part of global batch ``batch_idx``, which brings its
        micro-batches. A shard that has micro-batches is always read so: its parts differ in size.
        """
        counts = self.elem_counts_per_gb
        if counts is not None and (batch_size is None or self.micro_batch_indices is not None):
            return self._get_global_batch(batch_idx, counts)
        if batch_size is None:
            raise DataError(
                f"batch {batch_idx} without batch_size is defined only for a shard made by "
                "shard_by_batch_size; pass batch_size"
            )
        start = batch_idx * batch_size
        if batch_size < 1 or not 0 <= start < max(1, self.size):
            raise DataError(
                f"batch {batch_idx} of {batch_size} rows starts outside the {self.size} rows"
            )
        return self.slice(start, min(start + batch_size, self.size))

    def _get_global_batch(self, number: int, counts: list[int]) -> "SlicedDataDict":
        if not 0 <= number < len(counts):
            raise DataError(f"global batch {number} is outside 0..{len(counts) - 1}")
        start = sum(counts[:number])
        batch = self.slice(start, start + counts[number])
        only = slice(number, number + 1)
        batch.elem_counts_per_gb = counts[only]
        if self.largest_counts_per_gb is not None:
            batch.largest_counts_per_gb = self.largest_counts_per_gb[only]
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = self.micro_batch_indices[only]
            batch.micro_batch_lengths = self.micro_batch_lengths[only]
        return batch

    def select_indices(self, indices: Sequence[int] | Tensor) -> "BatchedDataDict[ColumnsT]":
        """The rows at ``indices``, integers [n], in that order, repeated where an index is."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return BatchedDataDict({key: _take(column, index) for key, column in self.data.items()})

    def reorder_data(self, reordered_indices: Sequence[int]) -> None:
        """Undo a reordering in place: row ``i`` moves to position ``reordered_indices[i]``."""
        if sorted(reordered_indices) != list(range(self.size)):
            raise DataError(
                f"reorder_data needs every index 0..{self.size - 1} once, got {reordered_indices}"
            )
        inverse = torch.empty(self.size, dtype=torch.int64)
        inverse[torch.as_tensor(reordered_indices, dtype=torch.int64)] = torch.arange(self.size)
        self.data = self.select_indices(inverse).data

    def repeat_interleave(self, num_repeats: int) -> "BatchedDataDict[ColumnsT]":
        """Each row ``num_repeats`` times, copies adjacent."""
        return self.select_indices(torch.arange(self.size).repeat_interleave(num_repeats))

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor that has dimension ``dim`` to ``truncated_len`` there, in place."""
        for key, column in self.data.items():
            if isinstance(column, Tensor) and column.ndim > dim:
                length = min(truncated_len, column.shape[dim])
                self.data[key] = column.narrow(dim, 0, length)

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors to ``device``, in place; returns itself."""
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                self.data[key] = column.to(device)
        return self

    def make_microbatch_iterator(self, microbatch_size: int) -> "Iterator[SlicedDataDict]":
        """Consecutive runs of ``microbatch_size`` rows; the last one may be shorter.

        A shard's global batch yields as many as that of the largest shard, the last ones without
        rows where need be, so that all ranks run the same number.
        """
        if microbatch_size < 1:
            raise DataError(f"a micro-batch needs at least one row, got {microbatch_size}")
        rows = self.size
        most = rows
        if self.largest_counts_per_gb is not None and len(self.largest_counts_per_gb) == 1:
            most = self.largest_counts_per_gb[0]
        for start in range(0, most, microbatch_size):
            yield self.slice(min(start, rows), min(start + microbatch_size, rows))

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> "Iterator[SlicedDataDict]":
        """Micro-batches of a shard's global batch; tensors are cut to the micro-batch's width.

        Where a tensor is narrower than that width (which is rounded up), it stays so.
        """
        bounds, lengths = self._only_global_batch()
        for (start, end), length in zip(bounds, lengths, strict=True):
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(sequence_dim, length)
            yield microbatch

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Number of micro-batches that `make_microbatch_iterator_with_dynamic_shapes` yields."""
        return len(self._only_global_batch()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> "Iterator[SlicedDataDict]":
        """Micro-batches of a shard's global batch: rows that fit into one packed row together."""
        for start, end in self._only_global_batch()[0]:
            yield self.slice(start, end)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Number of micro-batches, and the tokens of the longest packed row."""
        bounds, lengths = self._only_global_batch()
        return len(bounds), max(lengths, default=0)

    def all_gather(self, group: dist.ProcessGroup) -> Self:
        """The rows of all ranks of ``group`` in rank order, the same on every rank.

        Ranks may hold different numbers of rows, none included, and tensors of different widths
        (right-padded as `from_batches` does). Tensors arrive on the device of this rank's column.
        Every rank must call this.

        Raises:
            DataError: ranks hold different columns, or a column in different types; on every rank.
        """
        everyone: list[Any] = [None] * dist.get_world_size(group)
        mine = {  # a copy: of a view, the memory of the whole would be sent
            key: column.detach().to("cpu", copy=True) if isinstance(column, Tensor) else column
            for key, column in self.data.items()
        }
        dist.all_gather_object(everyone, mine, group=group)
        _check_same_columns(everyone)
        joined = type(self).from_batches(everyone)
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                joined[key] = joined[key].to(column.device)
        return joined

    def get_dict(self) -> dict[str, Any]:
        """The columns as a plain dict."""
        return dict(self.data)

    def _planned_shards(
        self, plans: list[sharding.ShardPlan]
    ) -> "tuple[list[SlicedDataDict], list[int]]":
        rows = [[[row for part in batch for row in part.rows] for batch in plan] for plan in plans]
        shards = self._shards(rows)
        for shard, plan in zip(shards, plans, strict=True):
            shard.micro_batch_lengths = [[part.length for part in batch] for batch in plan]
            shard.micro_batch_indices = []
            for batch in plan:
                bounds = accumulate((len(part.rows) for part in batch), initial=0)
                shard.micro_batch_indices.append([list(bound) for bound in pairwise(bounds)])
        return shards, [row for shard in rows for batch in shard for row in batch]

    def _shards(self, rows: Sequence[Sequence[Sequence[int]]]) -> "list[SlicedDataDict]":
        """Shards with the given rows: ``rows[shard][global batch]``."""
        shards = []
        largest = [max(map(len, batch)) for batch in zip(*rows, strict=True)]
        for batches in rows:
            indices = [row for batch in batches for row in batch]
            shard = SlicedDataDict(self.select_indices(indices).data)
            shard.elem_counts_per_gb = [len(batch) for batch in batches]
            shard.largest_counts_per_gb = list(largest)
            shards.append(shard)
        return shards

    def _only_global_batch(self) -> tuple[list[list[int]], list[int]]:
        """Bounds and lengths of the micro-batches of the one global batch in here."""
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise DataError(
                "this batch has no micro-batches; make shards with shard_by_batch_size and "
                "dynamic_batching_args or sequence_packing_args"
            )
        if not self.micro_batch_indices:
            return [], []
        if len(self.micro_batch_indices) > 1:
            raise DataError(
                f"this shard holds {len(self.micro_batch_indices)} global batches; take one with "
                "get_batch first"
            )
        return self.micro_batch_indices[0], self.micro_batch_lengths[0]


class SlicedDataDict(BatchedDataDict[Any]):
    """Some rows of a batch: one rank's shard, or one micro-batch."""


def _check_batches(total: int, batch_size: int, shards: int, allow_short: bool) -> None:
    if shards < 1:
        raise DataError(f"{shards} shards: a batch is shared by at least one")
    if total and (batch_size < 1 or (total % batch_size and not allow_short)):
        raise DataError(
            f"{total} rows are not a multiple of the batch size {batch_size}; change the batch "
            "size or pass allow_uneven_shards=True for a shorter last batch"
        )


def _check_even(batch_size: int, shards: int) -> None:
    if batch_size % shards:
        raise DataError(
            f"a batch of {batch_size} rows cannot be shared evenly by {shards} shards; "
            "change the batch size or pass allow_uneven_shards=True"
        )


def columns_of(data: BatchedDataDict, names: Sequence[str]) -> BatchedDataDict:
    """The named columns, so that no worker is sent what it does not read.

    Where ``token_mask`` is absent every token but a row's first is meant; where ``sample_ids`` is
    absent the rows are samples 0, 1, 2, ... ``position_ids`` go where ``input_ids`` go.

    Raises:
        DataError: another column is absent, or ``data`` is no `BatchedDataDict`.
    """
    check_columns(data, [name for name in names if name not in _DERIVED])
    if "input_ids" in names and "position_ids" in data:
        names = [*names, "position_ids"]
    return BatchedDataDict(
        {name: data[name] if name in data else _DERIVED[name](data) for name in names}
    )


def check_columns(data: BatchedDataDict, names: Sequence[str]) -> None:
    """Refuse what is no batch, or lacks one of the named columns."""
    if not isinstance(data, BatchedDataDict):
        raise DataError(
            f"data is a {type(data).__name__}; give an "
            "aligner.distributed.batched_data_dict.BatchedDataDict"
        )
    missing = [name for name in names if name not in data]
    if missing:
        raise DataError(
            f"{', '.join(missing)}: required and not in the batch, which has "
            f"{', '.join(sorted(data)) or 'no column'}; add what is missing"
        )


def _every_token(data: BatchedDataDict) -> Tensor:
    position = torch.arange(data["input_ids"].shape[1])
    lengths = data["input_lengths"].cpu()
    return ((position > 0) & (position < lengths[:, None])).float()


_DERIVED: Mapping[str, Callable[[BatchedDataDict], Tensor]] = {
    "token_mask": _every_token,
    "sample_ids": lambda data: torch.arange(data.size),
}


def _take(column: Any, index: Tensor) -> Any:
    """The rows at ``index`` int64 [N], in that order."""
    if isinstance(column, Tensor):
        return column[index.to(column.device)]
    return [column[i] for i in index.tolist()]


def _join(columns: Sequence[Any], pad_value: int | float) -> Any:
    """Rows one column after the other; tensors are right-padded in dimension 1 to the widest.

    A column without rows does not decide the width.
    """
    if not isinstance(columns[0], Tensor):
        return [item for column in columns for item in column]
    filled = [column for column in columns if len(column)] or columns[:1]
    if filled[0].ndim < 2:
        return torch.cat(list(filled))
    width = max(column.shape[1] for column in filled)
    return torch.cat([_pad(column, width, pad_value) for column in filled])


def _check_same_columns(everyone: Sequence[Mapping[str, Any]]) -> None:
    kinds = [
        {key: str(getattr(column, "dtype", "list")) for key, column in columns.items()}
        for columns in everyone
    ]
    for rank, columns in enumerate(kinds):
        if columns != kinds[0]:
            raise DataError(
                f"rank {rank} of the group has columns {columns}, rank 0 has {kinds[0]}; "
                "all ranks must bring the same columns"
            )


def _pad(column: Tensor, width: int, value: int | float) -> Tensor:
    """Right-pad dimension 1 of ``[B, S, ...]`` to ``width``."""
    if column.shape[1] == width:
        return column
    trailing = [0, 0] * (column.ndim - 2)
    return functional.pad(column, [*trailing, 0, width - column.shape[1]], value=value)
