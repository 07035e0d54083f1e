"""How a front spreads a global batch over its workers."""

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.worker_groups import MODEL_AXES, WorkerGroup


def run_sharded(
    group: WorkerGroup,
    method_name: str,
    data: BatchedDataDict,
    batch_size: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call a worker method with each data-parallel rank's share; one result per rank, in order.

    ``batch_size``: rows of a global mini-batch that every rank must get its share of; None where
    rows are independent, which also allows shares of different sizes, or empty ones.
    """
    shards = data.shard_by_batch_size(
        group.sharding_annotations.get_axis_size("data_parallel"),
        batch_size=batch_size,
        allow_uneven_shards=batch_size is None,
    )
    future = group.run_all_workers_sharded_data(
        method_name,
        data=shards,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=MODEL_AXES,
        output_is_replicated=MODEL_AXES,
        common_kwargs=kwargs,
    )
    return group.get_all_worker_results(future)


def run_on_all(group: WorkerGroup, method_name: str, **kwargs: Any) -> list[Any]:
    """Call a worker method with the same arguments everywhere and wait for it."""
    return group.get_all_worker_results(group.run_all_workers_single_data(method_name, **kwargs))


def columns_of(data: Mapping[str, Any], names: Sequence[str]) -> BatchedDataDict:
    """The named columns, so that no worker is sent what it does not read."""
    return BatchedDataDict({name: data[name] for name in names})


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
