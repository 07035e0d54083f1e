"""A batch: named columns of equal length, and how it is cut up, joined and put in order."""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, NotRequired, Self, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from aligner.errors import DataError

ColumnsT = TypeVar("ColumnsT")


class DynamicBatchingArgs(TypedDict):
    """How ``shard_by_batch_size`` forms micro-batches under a token budget."""

    max_tokens_per_microbatch: int  # padded tokens, per rank
    sequence_length_round: int  # padded lengths are rounded up to a multiple of it
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]


class SequencePackingArgs(TypedDict):
    """How ``shard_by_batch_size`` packs several sequences into one row."""

    max_tokens_per_microbatch: int  # tokens of a packed row
    input_key: str
    input_lengths_key: str
    algorithm: str  # name of a packing algorithm
    sequence_length_pad_multiple: int  # each sequence is padded to a multiple of it
    min_bin_count: NotRequired[int]
    bin_count_multiple: NotRequired[int]


class BatchedDataDict(UserDict[str, Any], Generic[ColumnsT]):
    """Columns by name; each is a tensor ``[B, ...]`` or a list of B objects."""

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, int | float] | None = None,
    ) -> Self:
        """Join batches row after row; tensors are right-padded in dimension 1 to the longest.

        ``pad_value_dict`` gives the padding value by column, 0 where it names none. A batch without
        rows adds none, whatever its width.
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
        pads = pad_value_dict or {}
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
    ) -> "list[SlicedDataDict]":
        """Cut every run of ``batch_size`` rows into ``shards`` parts; shard i gets the i-th parts.

        So rank i sees its share of global batch 0, then of global batch 1, and so on. None as
        ``batch_size`` means one batch of all rows. With ``allow_uneven_shards`` the first shards
        get a row more where the rows do not divide, and some get none where they are too few.
        """
        if dynamic_batching_args is not None or sequence_packing_args is not None:
            raise NotImplementedError(
                "dynamic batching and sequence packing are not in this version; "
                "shard without dynamic_batching_args and sequence_packing_args"
            )
        total = self.size
        batch_size = total if batch_size is None else batch_size
        if not allow_uneven_shards:
            _check_even(total, batch_size, shards)
        rows: list[list[int]] = [[] for _ in range(shards)]
        for start in range(0, total, max(1, batch_size)):
            count = min(batch_size, total - start)
            for shard, (low, high) in enumerate(_split(count, shards)):
                rows[shard].extend(range(start + low, start + high))
        return [SlicedDataDict(self.select_indices(indices).data) for indices in rows]

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict":
        """Part ``rank`` of ``chunks`` equal contiguous parts; refuses sizes that do not divide."""
        _check_even(self.size, self.size, chunks)
        if not 0 <= rank < chunks:
            raise DataError(f"chunk {rank} is outside 0..{chunks - 1}")
        step = self.size // chunks
        return self.slice(rank * step, (rank + 1) * step)

    def slice(self, start: int, end: int) -> "SlicedDataDict":
        """Rows ``start`` to ``end`` (excluded); tensors are views."""
        return SlicedDataDict({key: column[start:end] for key, column in self.data.items()})

    def get_batch(self, batch_idx: int, batch_size: int) -> "SlicedDataDict":
        """Rows of the ``batch_idx``-th batch of ``batch_size``; the last one may be shorter."""
        start = batch_idx * batch_size
        if batch_size < 1 or not 0 <= start < max(1, self.size):
            raise DataError(
                f"batch {batch_idx} of {batch_size} rows starts outside the {self.size} rows"
            )
        return self.slice(start, min(start + batch_size, self.size))

    def select_indices(self, indices: Sequence[int] | Tensor) -> "BatchedDataDict[ColumnsT]":
        """The rows at ``indices``, in that order, repeated where an index is."""
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
        """Consecutive runs of ``microbatch_size`` rows; the last one may be shorter."""
        if microbatch_size < 1:
            raise DataError(f"a micro-batch needs at least one row, got {microbatch_size}")
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, min(start + microbatch_size, self.size))

    def get_dict(self) -> dict[str, Any]:
        """The columns as a plain dict."""
        return dict(self.data)


class SlicedDataDict(BatchedDataDict[Any]):
    """Some rows of a batch: one rank's shard, or one micro-batch."""


def _split(count: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of ``parts`` contiguous runs of ``count`` rows, sizes differing by at most one."""
    base, extra = divmod(count, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return list(pairwise(bounds))


def _check_even(total: int, batch_size: int, shards: int) -> None:
    if batch_size < 1 or total % batch_size:
        raise DataError(f"{total} rows are not a multiple of the batch size {batch_size}")
    if batch_size % shards:
        raise DataError(
            f"a batch of {batch_size} rows cannot be shared evenly by {shards} shards; "
            "change the batch size or pass allow_uneven_shards=True"
        )


def _take(column: Any, index: Tensor) -> Any:
    if isinstance(column, Tensor):
        return column[index.to(column.device)]
    return [column[i] for i in index.tolist()]


def _join(columns: list[Any], pad_value: int | float) -> Any:
    if not isinstance(columns[0], Tensor):
        return [item for column in columns for item in column]
    filled = [column for column in columns if len(column)] or columns[:1]
    if filled[0].ndim < 2:
        return torch.cat(filled)
    width = max(column.shape[1] for column in filled)
    return torch.cat([_pad(column, width, pad_value) for column in filled])


def _pad(column: Tensor, width: int, value: int | float) -> Tensor:
    """Right-pad dimension 1 of ``[B, S, ...]`` to ``width``."""
    if column.shape[1] == width:
        return column
    trailing = [0, 0] * (column.ndim - 2)
    return functional.pad(column, [*trailing, 0, width - column.shape[1]], value=value)
