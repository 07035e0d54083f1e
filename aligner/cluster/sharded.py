"""Distribution of a global batch over a front's workers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from aligner.batches.batched_data_dict import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
)
from aligner.cluster.worker_groups import MODEL_AXES, WorkerGroup
from aligner.config import TrainedModelConfig
from aligner.errors import ConfigError, DataError


class MicroBatching(TypedDict, total=False):
    """Formation of micro-batches by tokens: one of these, or neither."""

    dynamic_batching_args: DynamicBatchingArgs
    sequence_packing_args: SequencePackingArgs


def micro_batching(
    model: TrainedModelConfig,
    *,
    training: bool,
    micro_batch_size: int | None = None,
    rows_per_group: int = 1,
) -> MicroBatching:
    """The configured way to form micro-batches; none where a caller gives their size.

    ``rows_per_group``: number of adjacent rows that stay together.
    """
    budgets = model.token_budgets
    if budgets is None or micro_batch_size is not None:
        return {}
    tokens = budgets.train_mb_tokens
    if not training and budgets.logprob_mb_tokens is not None:
        tokens = budgets.logprob_mb_tokens
    if model.sequence_packing.enabled:
        return {
            "sequence_packing_args": {
                "max_tokens_per_microbatch": tokens,
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "algorithm": model.sequence_packing.algorithm,
                "sequence_length_pad_multiple": model.parallel.sequence_multiple,
                "rows_per_group": rows_per_group,
            }
        }
    return {
        "dynamic_batching_args": {
            "max_tokens_per_microbatch": tokens,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_round": model.parallel.row_multiple(model.sequence_length_round),
            "rows_per_group": rows_per_group,
        }
    }


def check_whole_groups(
    group: WorkerGroup, batch_size: int, micro_batch_size: int, rows_per_group: int
) -> None:
    """Refuse micro-batches whose number of rows cuts through groups of adjacent rows."""
    if rows_per_group == 1:
        return
    ranks = group.sharding_annotations.get_axis_size("data_parallel")
    if batch_size % (ranks * rows_per_group) or micro_batch_size % rows_per_group:
        raise ConfigError(
            f"global_batch_size={batch_size} on {ranks} data-parallel ranks in micro-batches of "
            f"micro_batch_size={micro_batch_size} rows, and {rows_per_group} adjacent rows belong "
            f"together; make global_batch_size a multiple of {ranks * rows_per_group} and "
            f"micro_batch_size one of {rows_per_group}"
        )


def run_sharded(
    group: WorkerGroup,
    method_name: str,
    data: BatchedDataDict,
    batch_size: int | None = None,
    batching: MicroBatching | None = None,
    **kwargs: Any,
) -> tuple[list[Any], list[int]]:
    """Call a worker method with each data-parallel rank's share.

    Args:
        group: the workers.
        method_name: the method.
        data: global batches.
        batch_size: rows of a global mini-batch that every rank must get its share of; None where
            rows are independent, which also allows shares of different sizes, or empty ones.
        batching: what forms the micro-batches that the shares bring; default nothing.
        kwargs: passed on to the method.

    Returns:
        One result per rank, in order; and where the rows of the results, one after the other,
        stood in ``data``.
    """
    # The overloads tell a mode by its argument's name, which an unpacked mapping hides.
    shards: Any = data.shard_by_batch_size(  # type: ignore[call-overload]
        group.sharding_annotations.get_axis_size("data_parallel"),
        batch_size=batch_size,
        allow_uneven_shards=batch_size is None,
        **(batching or {}),
    )
    order = list(range(data.size))
    if batching:
        shards, order = shards
    future = group.run_all_workers_sharded_data(
        method_name,
        data=shards,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=MODEL_AXES,
        output_is_replicated=MODEL_AXES,
        common_kwargs=kwargs,
    )
    return group.get_all_worker_results(future), order


def score_sharded(
    group: WorkerGroup,
    method_name: str,
    data: BatchedDataDict,
    model: TrainedModelConfig,
    micro_batch_size: int | None = None,
    **kwargs: Any,
) -> BatchedDataDict:
    """Call a worker method that scores rows; the scores in the order of ``data``.

    ``micro_batch_size``: sequences per forward pass; default that of ``model``. ``kwargs`` are
    passed on.
    """
    batching = micro_batching(model, training=False, micro_batch_size=micro_batch_size)
    results, order = run_sharded(
        group, method_name, data, batching=batching, micro_batch_size=micro_batch_size, **kwargs
    )
    scores: BatchedDataDict = BatchedDataDict.from_batches(results)
    scores.reorder_data(order)
    return scores


def run_on_all(group: WorkerGroup, method_name: str, **kwargs: Any) -> list[Any]:
    """Call a worker method with the same arguments everywhere and wait for it."""
    return group.get_all_worker_results(group.run_all_workers_single_data(method_name, **kwargs))


def columns_of(data: BatchedDataDict, names: Sequence[str]) -> BatchedDataDict:
    """The named columns, so that no worker is sent what it does not read.

    Where ``token_mask`` is absent every token but a row's first is meant; where ``sample_ids`` is
    absent the rows are samples 0, 1, 2, ...

    Raises:
        DataError: another column is absent, or ``data`` is no `BatchedDataDict`.
    """
    check_columns(data, [name for name in names if name not in _DERIVED])
    return BatchedDataDict(
        {name: data[name] if name in data else _DERIVED[name](data) for name in names}
    )


def check_columns(data: BatchedDataDict, names: Sequence[str]) -> None:
    """Refuse what is no batch, or lacks one of the named columns."""
    if not isinstance(data, BatchedDataDict):
        raise DataError(
            f"data is a {type(data).__name__}; give an "
            "aligner.batches.batched_data_dict.BatchedDataDict"
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


def train_result(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One pass's result out of the workers' identical ones, under the published keys."""
    first = results[0]
    return {
        "loss": first["global_loss"],
        "grad_norm": first["grad_norm"],
        "lr": first["lr"],
        "skipped": first["skipped"],
        "all_mb_metrics": dict(first["all_mb_metrics"]),
    }
