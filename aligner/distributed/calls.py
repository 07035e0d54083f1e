"""Calls of a role's workers by its handle, on any engine.

A handle (``Policy``, ``Value``) gives a group one shard of data per data-parallel coordinate and
gets one result per data-parallel coordinate back. What a handle only passes on it declares: a call
of every worker, or on shards of a batch whose rows are scored. Name, signature and docstring are
those of the worker method::

    prepare_for_training = phase(RoleWorker.prepare_for_training)
    num_parameters = on_all_workers(RoleWorker.num_parameters)
    get_values = scored_rows(ValueWorker.get_values, ("input_ids", "input_lengths"))
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from aligner.config import TrainedModelConfig
from aligner.distributed.batched_data_dict import BatchedDataDict, columns_of
from aligner.distributed.interfaces import WorkerFuture, WorkerGroup
from aligner.distributed.named_sharding import MODEL_AXES
from aligner.distributed.sharding import MicroBatching

P = ParamSpec("P")
R = TypeVar("R")


def on_all_workers(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Method of a handle that calls ``method`` on every worker of its ``worker_group``.

    The results are the same on all workers; one is returned.
    """

    @functools.wraps(method)
    def call(handle: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return run_on_all(handle.worker_group, method, *args, **kwargs)[0]

    return call


def phase(method: Callable[[Any], R]) -> Callable[..., R]:
    """`on_all_workers` of a method without arguments; a caller's are ignored.

    NeMo-RL publishes the phases of its handles with ``*args, **kwargs``.
    """

    @functools.wraps(method)
    def call(handle: Any, /, *args: Any, **kwargs: Any) -> R:
        del args, kwargs
        return run_on_all(handle.worker_group, method)[0]

    return call


def scored_rows(
    method: Callable[Concatenate[Any, P], BatchedDataDict],
    columns: Sequence[str],
    optional: Sequence[str] = (),
) -> Callable[Concatenate[Any, P], BatchedDataDict]:
    """Method of a handle that scores the rows of a global batch; the scores are in their order.

    Args:
        method: of a worker; takes ``data``, its share of ``columns``, and ``micro_batch_size``:
            sequences per forward pass, default those of the handle's ``model``.
        columns: those that ``method`` reads, see `columns_of`.
        optional: those that it reads where they are there.
    """

    @functools.wraps(method)
    def call(handle: Any, /, *args: P.args, **kwargs: P.kwargs) -> BatchedDataDict:
        given = by_name(method, *args, **kwargs)
        data = given.pop("data")
        there = [name for name in optional if isinstance(data, Mapping) and name in data]
        rows = columns_of(data, [*columns, *there])
        batching = micro_batching(
            handle.model, training=False, micro_batch_size=given.get("micro_batch_size")
        )
        results, order = run_sharded(handle.worker_group, method, rows, batching=batching, **given)
        scores: BatchedDataDict = BatchedDataDict.from_batches(results)
        scores.reorder_data(order)
        return scores

    return call


def by_name(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of ``method``, without its first parameter, by their names."""
    signature = inspect.signature(method)
    signature.bind(None, *args, **kwargs)  # TypeError here, not in another process
    return dict(zip(list(signature.parameters)[1:], args, strict=False)) | kwargs


def start_on_all(
    group: WorkerGroup, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
) -> WorkerFuture:
    """Begin to call a worker method with the same arguments everywhere; the caller waits."""
    given = by_name(method, *args, **kwargs)
    return group.run_all_workers_single_data(method.__name__, **given)


def run_on_all(
    group: WorkerGroup, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
) -> list[R]:
    """Call a worker method with the same arguments everywhere and wait for it."""
    return group.get_all_worker_results(start_on_all(group, method, *args, **kwargs))


def run_sharded(
    group: WorkerGroup,
    method: Callable[..., R],
    data: BatchedDataDict,
    batch_size: int | None = None,
    batching: MicroBatching | None = None,
    **kwargs: Any,
) -> tuple[list[R], list[int]]:
    """Call a worker method with each data-parallel rank's share.

    Args:
        group: the workers.
        method: the method, of which ``data`` is the first parameter.
        data: global batches.
        batch_size: rows of a global mini-batch that every rank must get its share of; None where
            rows are independent, which also allows shares of different sizes, or empty ones.
        batching: forms the micro-batches that the shares bring; default nothing.
        kwargs: passed on to the method.

    Returns:
        One result per rank, in order; and where the rows of the results, one after the other,
        stood in ``data``.
    """
    # The overloads know a mode by its argument's name, which an unpacked mapping hides.
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
        method.__name__,
        data=shards,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=MODEL_AXES,
        output_is_replicated=MODEL_AXES,
        common_kwargs=kwargs,
    )
    return group.get_all_worker_results(future), order


def micro_batching(
    model: TrainedModelConfig | None,
    *,
    training: bool,
    micro_batch_size: int | None = None,
    rows_per_group: int = 1,
) -> MicroBatching:
    """The configured way to form micro-batches; none where a caller gives their size.

    ``model``: None for workers that form their own. ``rows_per_group``: number of adjacent rows
    that stay together.
    """
    if model is None or model.token_budgets is None or micro_batch_size is not None:
        return {}
    budgets = model.token_budgets
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
                "shared_prefixes": model.plans_shared_prefixes,
            }
        }
    return {
        "dynamic_batching_args": {
            "max_tokens_per_microbatch": tokens,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_round": model.parallel.row_multiple(model.sequence_length_round),
            "rows_per_group": rows_per_group,
            "shared_prefixes": model.plans_shared_prefixes,
        }
    }
