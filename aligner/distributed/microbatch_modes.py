"""The two ways to form micro-batches by tokens: padded under a budget, or packed."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch

from aligner.data.packing import get_packer
from aligner.distributed import sharding
from aligner.errors import ConfigError, DataError


class DynamicBatchingArgs(TypedDict):
    """How ``shard_by_batch_size`` forms micro-batches under a token budget."""

    max_tokens_per_microbatch: int  # rows times padded length, per rank
    sequence_length_round: int  # padded lengths are rounded up to a multiple of it
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]


class SequencePackingArgs(TypedDict):
    """How ``shard_by_batch_size`` packs several sequences into one row."""

    max_tokens_per_microbatch: int  # tokens of a packed row
    input_key: str  # column of token ids [B, S]
    input_lengths_key: str  # column of lengths [B]
    algorithm: str  # name of a packing algorithm
    sequence_length_pad_multiple: int  # each sequence is padded to a multiple of it
    min_bin_count: NotRequired[int]  # packed rows per rank and global batch, at least
    bin_count_multiple: NotRequired[int]  # their number is a multiple of it


def dynamic_plan(
    columns: Mapping[str, Any], args: DynamicBatchingArgs, batches: Sequence[range], shards: int
) -> list[sharding.ShardPlan]:
    """`sharding.plan_dynamic` of a batch; ``batches`` are the rows of its global batches."""
    return sharding.plan_dynamic(
        _row_lengths(columns, args["input_key"], args["input_lengths_key"]),
        batches,
        shards,
        _positive("max_tokens_per_microbatch", args["max_tokens_per_microbatch"]),
        _positive("sequence_length_round", args["sequence_length_round"]),
    )


def packed_plan(
    columns: Mapping[str, Any], args: SequencePackingArgs, batches: Sequence[range], shards: int
) -> list[sharding.ShardPlan]:
    """`sharding.plan_packed` of a batch; ``batches`` are the rows of its global batches."""
    capacity = _positive("max_tokens_per_microbatch", args["max_tokens_per_microbatch"])
    return sharding.plan_packed(
        _row_lengths(columns, args["input_key"], args["input_lengths_key"]),
        batches,
        shards,
        get_packer(args["algorithm"], capacity),
        _positive("sequence_length_pad_multiple", args["sequence_length_pad_multiple"]),
        args.get("min_bin_count", 0),
        _positive("bin_count_multiple", args.get("bin_count_multiple", 1)),
    )


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
