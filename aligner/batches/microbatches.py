"""The two ways to form micro-batches by tokens: padded under a budget, or packed."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch

from aligner.batches import sharding
from aligner.batches.packing import get_packer
from aligner.errors import ConfigError, DataError


class DynamicBatchingArgs(TypedDict):
    """Arguments by which ``shard_by_batch_size`` forms micro-batches under a token budget."""

    max_tokens_per_microbatch: int  # rows times padded length, per rank
    sequence_length_round: int  # padded lengths are rounded up to a multiple of it
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]
    rows_per_group: NotRequired[int]  # adjacent rows that stay in one micro-batch; default 1


class SequencePackingArgs(TypedDict):
    """Arguments by which ``shard_by_batch_size`` packs several sequences into one row."""

    max_tokens_per_microbatch: int  # tokens of a packed row
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]
    algorithm: str  # name of a packing algorithm
    sequence_length_pad_multiple: int  # each sequence is padded to a multiple of it
    min_bin_count: NotRequired[int]  # packed rows per rank and global batch, at least
    bin_count_multiple: NotRequired[int]  # their number is a multiple of it
    rows_per_group: NotRequired[int]  # adjacent rows that stay in one packed row; default 1
    train_mb_tokens: NotRequired[int]  # not read: callers set max_tokens_per_microbatch by phase
    logprob_mb_tokens: NotRequired[int | None]  # likewise


def dynamic_plan(
    columns: Mapping[str, Any], args: DynamicBatchingArgs, batches: Sequence[range], shards: int
) -> list[sharding.ShardPlan]:
    """`sharding.plan_dynamic` of a batch; ``batches`` are the rows of its global batches."""
    lengths = _row_lengths(columns, args["input_key"], args["input_lengths_key"])
    size = _positive("rows_per_group", args.get("rows_per_group", 1))
    plans = sharding.plan_dynamic(
        [max(group) for group in _groups(lengths, size)],
        _group_batches(batches, size),
        shards,
        _positive("max_tokens_per_microbatch", args["max_tokens_per_microbatch"] // size),
        _positive("sequence_length_round", args["sequence_length_round"]),
    )
    return _rows_of_groups(plans, size)


def packed_plan(
    columns: Mapping[str, Any], args: SequencePackingArgs, batches: Sequence[range], shards: int
) -> list[sharding.ShardPlan]:
    """`sharding.plan_packed` of a batch; ``batches`` are the rows of its global batches."""
    capacity = _positive("max_tokens_per_microbatch", args["max_tokens_per_microbatch"])
    multiple = _positive("sequence_length_pad_multiple", args["sequence_length_pad_multiple"])
    lengths = _row_lengths(columns, args["input_key"], args["input_lengths_key"])
    size = _positive("rows_per_group", args.get("rows_per_group", 1))
    if size > 1:  # what each sequence of a group takes in the row
        lengths = [-(-length // multiple) * multiple for length in lengths]
    plans = sharding.plan_packed(
        [sum(group) for group in _groups(lengths, size)],
        _group_batches(batches, size),
        shards,
        get_packer(args["algorithm"], capacity),
        multiple,
        args.get("min_bin_count", 0),
        _positive("bin_count_multiple", args.get("bin_count_multiple", 1)),
    )
    return _rows_of_groups(plans, size)


def _groups(lengths: Sequence[int], size: int) -> list[Sequence[int]]:
    """Runs of ``size`` rows' lengths."""
    if len(lengths) % size:
        raise DataError(f"{len(lengths)} rows cannot be taken {size} at a time")
    return [lengths[start : start + size] for start in range(0, len(lengths), size)]


def _group_batches(batches: Sequence[range], size: int) -> list[range]:
    """The groups of each global batch of rows."""
    for batch in batches:
        if batch.start % size or batch.stop % size:
            raise DataError(
                f"a global batch of rows {batch.start} to {batch.stop} cuts a group of {size} "
                "adjacent rows; make the batch size a multiple of it"
            )
    return [range(batch.start // size, batch.stop // size) for batch in batches]


def _rows_of_groups(plans: list[sharding.ShardPlan], size: int) -> list[sharding.ShardPlan]:
    """Plans over groups as plans over their rows."""

    def expanded(part: sharding.MicrobatchPlan) -> sharding.MicrobatchPlan:
        rows = [group * size + member for group in part.rows for member in range(size)]
        return part._replace(rows=rows)

    return [[[expanded(part) for part in batch] for batch in plan] for plan in plans]


def _row_lengths(columns: Mapping[str, Any], input_key: str, lengths_key: str) -> list[int]:
    for name, key in (("input_key", input_key), ("input_lengths_key", lengths_key)):
        if key not in columns:
            raise DataError(
                f"{name}={key!r}: there is no such column; the columns are {sorted(columns)}"
            )
    lengths = torch.as_tensor(columns[lengths_key]).tolist()
    width = columns[input_key].shape[1]
    for row, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise DataError(
                f"{lengths_key}[{row}]={length} is outside 0..{width}, the width of "
                f"{input_key}; give lengths in tokens, padding not counted"
            )
    return lengths


def _positive(key: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{key}={value} must be at least 1")
    return value
