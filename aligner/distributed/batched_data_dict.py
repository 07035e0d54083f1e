"""`BatchedDataDict`: named columns of equal length, with methods to split, join and reorder."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from aligner.distributed.packing import at_least
from aligner.distributed.sharding import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    dynamic_plan,
    packed_plan,
)
from aligner.errors import ConfigError, DataError
from aligner.parallel.collectives import gather_objects
from aligner.types import PAD_VALUES

__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]

ColumnsT = TypeVar("ColumnsT")


class BatchedDataDict(UserDict[str, Any], Generic[ColumnsT]):
    """Batch of B rows: a mapping from column names to tensors ``[B, ...]`` or lists of length B.

    In shards made by `shard_by_batch_size`, four attributes are lists with one entry per global
    batch. In other batches they are None.

    * ``elem_counts_per_gb``: number of rows of the global batch in this shard.
    * ``largest_counts_per_gb``: number of rows of the global batch in the largest shard.
    * ``micro_batch_indices``: first row and end row of each micro-batch, in the global batch.
    * ``micro_batch_lengths``: padded width of each dynamic micro-batch, or padded number of tokens
      of each packed micro-batch.
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
        """Concatenate the rows of batches. Tensors are right-padded in dimension 1 to equal width.

        ``pad_value_dict``: padding value by column. Other columns are padded with their value in
        `aligner.types.PAD_VALUES`, else with 0. Raises `DataError` for no batches, or if the
        columns differ. The width of a batch without rows is ignored.
        """
        if not batches:
            raise DataError("from_batches got no batches. Pass at least one batch")
        keys = list(batches[0])
        for index, batch in enumerate(batches):
            if set(batch) != set(keys):
                raise DataError(
                    f"batch {index} has columns {sorted(batch)}, batch 0 has {sorted(keys)}. "
                    "Give all batches the same columns"
                )
        pads = {**PAD_VALUES, **(pad_value_dict or {})}
        return cls({key: _join([b[key] for b in batches], pads.get(key, 0)) for key in keys})

    @property
    def size(self) -> int:
        """Number of rows. Raises `DataError` if columns have different lengths."""
        lengths = {key: len(column) for key, column in self.data.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the columns have different lengths: {lengths}. Make them equal")
        return next(iter(lengths.values()), 0)

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> "list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]":
        """Split every global batch over ``shards`` shards, one for each data-parallel rank.

        A global batch is ``batch_size`` adjacent rows (default: all rows). Shard i contains its
        part of global batch 0, then its part of global batch 1, and so on.

        Without the last two arguments, the parts of a global batch are contiguous and have the same
        number of rows. With ``allow_uneven_shards`` the first parts may have one row more. Returns
        a list of shards.

        With ``dynamic_batching_args`` or ``sequence_packing_args``, the shards have the same number
        of micro-batches and similar numbers of tokens. Their numbers of rows may differ.
        ``allow_uneven_shards`` allows a shorter last global batch. Returns (shards,
        ``sorted_indices``): if results are concatenated in the order of the shards,
        ``results.reorder_data(sorted_indices)`` restores the order of this batch.

        Raises:
            ConfigError: both kinds of arguments are given, or one of their values is invalid.
            DataError: rows cannot be split evenly, a column is missing, or a row is too long.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ConfigError(
                "dynamic_batching_args and sequence_packing_args are both given, but a micro-batch "
                "is either padded or packed. Give only one of them"
            )
        total = self.size
        rows_per_batch = total if batch_size is None else batch_size
        if shards < 1:
            raise DataError(f"shards={shards} must be at least 1")
        is_uneven = rows_per_batch < 1 or (total % rows_per_batch and not allow_uneven_shards)
        if total and is_uneven:
            raise DataError(
                f"{total} rows are not a multiple of the batch size {rows_per_batch}. Change the "
                "batch size, or pass allow_uneven_shards=True for a shorter last batch"
            )
        starts = range(0, total, max(1, rows_per_batch))
        batches = [range(start, min(start + rows_per_batch, total)) for start in starts]
        # With a token limit, plan micro-batches and balance the shards' numbers of tokens.
        if dynamic_batching_args is not None:
            plans = dynamic_plan(self.data, dynamic_batching_args, batches, shards)
            return self._shards_with_plans(plans)
        if sequence_packing_args is not None:
            plans = packed_plan(self.data, sequence_packing_args, batches, shards)
            return self._shards_with_plans(plans)
        # Otherwise split each global batch into contiguous parts, one per shard.
        if not allow_uneven_shards:
            _check_even(rows_per_batch, shards)
        parts = [_split_evenly(batch, shards) for batch in batches]
        return self._shards([[part[shard] for part in parts] for shard in range(shards)])

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict":
        """Return part ``rank`` of ``chunks`` equal parts. Raises `DataError` for unequal parts."""
        _check_even(self.size, chunks)
        if not 0 <= rank < chunks:
            raise DataError(f"rank={rank} of {chunks} chunks must be from 0 to {chunks - 1}")
        step = self.size // chunks
        return self.slice(rank * step, (rank + 1) * step)

    def slice(self, start: int, end: int) -> "SlicedDataDict":
        """Return rows ``start`` to ``end - 1``. Tensors are views, not copies."""
        return SlicedDataDict({key: column[start:end] for key, column in self.data.items()})

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> "SlicedDataDict":
        """Return rows ``batch_idx * batch_size`` and following, at most ``batch_size`` of them.

        In a shard, without ``batch_size`` or with planned micro-batches: return the shard's part of
        global batch ``batch_idx``.
        """
        counts = self.elem_counts_per_gb
        if counts is not None and (batch_size is None or self.micro_batch_indices is not None):
            return self._get_global_batch(batch_idx, counts)
        if batch_size is None:
            raise DataError(
                f"get_batch({batch_idx}) without batch_size works only on a shard that "
                "shard_by_batch_size returned. Pass batch_size"
            )
        start = batch_idx * batch_size
        if batch_size < 1 or not 0 <= start < max(1, self.size):
            raise DataError(
                f"batch {batch_idx} of {batch_size} rows starts outside the {self.size} rows. Give "
                "a smaller batch_idx"
            )
        return self.slice(start, min(start + batch_size, self.size))

    def _get_global_batch(self, index: int, counts: list[int]) -> "SlicedDataDict":
        if not 0 <= index < len(counts):
            raise DataError(f"global batch {index} is outside 0..{len(counts) - 1}")
        start = sum(counts[:index])
        batch = self.slice(start, start + counts[index])
        for name in BatchedDataDict.__annotations__:  # the four attributes of a shard
            per_global_batch = getattr(self, name)
            if per_global_batch is not None:
                setattr(batch, name, per_global_batch[index : index + 1])
        return batch

    def select_indices(self, indices: Sequence[int] | Tensor) -> "BatchedDataDict[ColumnsT]":
        """Return the rows at ``indices``, integers [n], in this order. An index may occur twice."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return BatchedDataDict({key: _take(column, index) for key, column in self.data.items()})

    def reorder_data(self, reordered_indices: Sequence[int]) -> None:
        """Move row ``i`` to position ``reordered_indices[i]`` (a permutation), in place."""
        if sorted(reordered_indices) != list(range(self.size)):
            raise DataError(
                f"reordered_indices={reordered_indices} must contain every index from 0 to "
                f"{self.size - 1} once"
            )
        # Row i of the result is row inverse[i] of this batch.
        inverse = torch.empty(self.size, dtype=torch.int64)
        inverse[torch.as_tensor(reordered_indices, dtype=torch.int64)] = torch.arange(self.size)
        self.data = self.select_indices(inverse).data

    def repeat_interleave(self, num_repeats: int) -> "BatchedDataDict[ColumnsT]":
        """Return each row ``num_repeats`` times. Copies of a row are adjacent."""
        return self.select_indices(torch.arange(self.size).repeat_interleave(num_repeats))

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate dimension ``dim`` of every tensor to at most ``truncated_len``, in place."""
        for key, column in self.data.items():
            if isinstance(column, Tensor) and column.ndim > dim:
                length = min(truncated_len, column.shape[dim])
                self.data[key] = column.narrow(dim, 0, length)

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors to ``device`` in place and return ``self``."""
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                self.data[key] = column.to(device)
        return self

    def make_microbatch_iterator(self, microbatch_size: int) -> "Iterator[SlicedDataDict]":
        """Yield micro-batches of ``microbatch_size`` consecutive rows. The last may be shorter.

        In a shard with one global batch, all ranks yield the same number of micro-batches. A rank
        with few rows yields empty micro-batches at the end.
        """
        rows = largest = self.size
        if self.largest_counts_per_gb is not None and len(self.largest_counts_per_gb) == 1:
            largest = self.largest_counts_per_gb[0]
        for start in range(0, largest, at_least("microbatch_size", microbatch_size, 1)):
            yield self.slice(min(start, rows), min(start + microbatch_size, rows))

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> "Iterator[SlicedDataDict]":
        """Yield the micro-batches planned for a global batch, truncated in ``sequence_dim``."""
        bounds, lengths = self._only_global_batch()
        for (start, end), length in zip(bounds, lengths, strict=True):
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(sequence_dim, length)
            yield microbatch

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of micro-batches of `make_microbatch_iterator_with_dynamic_shapes`."""
        return len(self._only_global_batch()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> "Iterator[SlicedDataDict]":
        """Yield the planned micro-batches of one global batch. Each fits into one packed row."""
        for start, end in self._only_global_batch()[0]:
            yield self.slice(start, end)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return (number of planned micro-batches, number of tokens in the longest packed row)."""
        bounds, lengths = self._only_global_batch()
        return len(bounds), max(lengths, default=0)

    def all_gather(self, group: dist.ProcessGroup) -> Self:
        """Concatenate the rows of all ranks of ``group``, in rank order, on every rank.

        Numbers of rows and widths of tensors may differ (see `from_batches`). Raises `DataError` if
        column names or dtypes differ between ranks.
        """
        # Copies, because pickling a view would send the memory of the whole tensor.
        columns = {
            key: column.detach().to("cpu", copy=True) if isinstance(column, Tensor) else column
            for key, column in self.data.items()
        }
        rank_columns = gather_objects(columns, group)
        _check_same_columns(rank_columns)
        joined = type(self).from_batches(rank_columns)
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                joined[key] = joined[key].to(column.device)
        return joined

    def get_dict(self) -> dict[str, Any]:
        """Return the columns as a plain dict."""
        return dict(self.data)

    def _shards_with_plans(
        self, plans: list[ShardPlan]
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
        """Return one shard for each entry of ``rows``, which has row indices by global batch."""
        shards, largest = [], [max(map(len, batch)) for batch in zip(*rows, strict=True)]
        for batches in rows:
            indices = [row for batch in batches for row in batch]
            shard = SlicedDataDict(self.select_indices(indices).data)
            shard.elem_counts_per_gb = [len(batch) for batch in batches]
            shard.largest_counts_per_gb = list(largest)
            shards.append(shard)
        return shards

    def _only_global_batch(self) -> tuple[list[list[int]], list[int]]:
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise DataError(
                "this batch has no micro-batches. Call shard_by_batch_size with "
                "dynamic_batching_args or sequence_packing_args, and use its shards"
            )
        if not self.micro_batch_indices:
            return [], []
        if len(self.micro_batch_indices) > 1:
            raise DataError(
                f"this shard contains {len(self.micro_batch_indices)} global batches. Select one "
                "with get_batch first"
            )
        return self.micro_batch_indices[0], self.micro_batch_lengths[0]


class SlicedDataDict(BatchedDataDict[Any]):
    """Some rows of a batch: a shard for one rank, or a micro-batch."""


def _check_even(batch_size: int, shards: int) -> None:
    if batch_size % shards:
        raise DataError(
            f"a batch of {batch_size} rows cannot be split evenly into {shards} shards. "
            "Change the batch size, or pass allow_uneven_shards=True"
        )


def _split_evenly(rows: range, parts: int) -> list[range]:
    base, extra = divmod(len(rows), parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [rows[low:high] for low, high in pairwise(bounds)]


def columns_of(data: BatchedDataDict, names: Sequence[str]) -> BatchedDataDict:
    """Return the columns ``names``, and if they include ``input_ids`` also ``position_ids``.

    A missing ``token_mask`` is 1 for all tokens except the first of each row. Missing
    ``sample_ids`` are 0, 1, 2, ... Raises `DataError` if any other column is missing.
    """
    check_columns(data, [name for name in names if name not in _DERIVED])
    if "input_ids" in names and "position_ids" in data:
        names = [*names, "position_ids"]
    return BatchedDataDict(
        {name: data[name] if name in data else _DERIVED[name](data) for name in names}
    )


def check_columns(data: BatchedDataDict, names: Sequence[str]) -> None:
    """Raise `DataError` unless ``data`` is a `BatchedDataDict` with the columns ``names``."""
    if not isinstance(data, BatchedDataDict):
        raise DataError(
            f"data is a {type(data).__name__}. Give an "
            "aligner.distributed.batched_data_dict.BatchedDataDict"
        )
    missing = [name for name in names if name not in data]
    if missing:
        raise DataError(
            f"{', '.join(missing)}: required but missing from the batch with the columns "
            f"{', '.join(sorted(data)) or '(none)'}. Add the missing columns"
        )


def _every_token(data: BatchedDataDict) -> Tensor:
    # No token predicts the first token of a row.
    position = torch.arange(data["input_ids"].shape[1])
    lengths = data["input_lengths"].cpu()
    return ((position > 0) & (position < lengths[:, None])).float()


_DERIVED: Mapping[str, Callable[[BatchedDataDict], Tensor]] = {
    "token_mask": _every_token,
    "sample_ids": lambda data: torch.arange(data.size),
}


def _take(column: Any, index: Tensor) -> Any:
    if isinstance(column, Tensor):
        return column[index.to(column.device)]
    return [column[i] for i in index.tolist()]


def _join(columns: Sequence[Any], pad_value: int | float) -> Any:
    if not isinstance(columns[0], Tensor):
        return [item for column in columns for item in column]
    filled = [column for column in columns if len(column)] or columns[:1]
    if filled[0].ndim < 2:
        return torch.cat(list(filled))
    width = max(column.shape[1] for column in filled)
    trailing = [0, 0] * (filled[0].ndim - 2)
    return torch.cat(
        [
            column
            if column.shape[1] == width
            else functional.pad(column, [*trailing, 0, width - column.shape[1]], value=pad_value)
            for column in filled
        ]
    )


def _check_same_columns(rank_columns: Sequence[Mapping[str, Any]]) -> None:
    dtypes = [
        {key: str(getattr(column, "dtype", "list")) for key, column in columns.items()}
        for columns in rank_columns
    ]
    for rank, columns in enumerate(dtypes):
        if columns != dtypes[0]:
            raise DataError(
                f"rank {rank} of the group has columns {columns}, rank 0 has {dtypes[0]}. "
                "Give all ranks the same columns"
            )
