"""Functions by which handles call worker groups, and `LocalCluster`, whose worker is this process.

With a ``LocalWorkerGroup`` every process runs the same handle code. An all-gather over data
parallel returns the results of all ranks, or the exception of one rank, to every rank.

A handle is an object in the driver, such as `Policy`, that calls workers. It declares methods that
only call all workers, or score the rows of a batch::

    has_finite_weights = on_all_workers(RoleWorker.has_finite_weights)
    get_values = scored_rows(ValueWorker.get_values, ("input_ids", "input_lengths"))
"""

import functools
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from aligner.config import TrainedModelConfig
from aligner.config.layout import ParallelConfig
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict, columns_of
from aligner.distributed.interfaces import WorkerFuture, WorkerGroup
from aligner.distributed.named_sharding import MODEL_AXES, layout_of
from aligner.distributed.sharding import MicroBatching
from aligner.errors import AlignerError, ConfigError, LayoutError, WorkerError
from aligner.parallel.collectives import gather_objects
from aligner.parallel.groups import ParallelState

P = ParamSpec("P")
R = TypeVar("R")


def on_all_workers(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a handle method that calls ``method`` on all workers, and returns the first result."""

    @functools.wraps(method)
    def call(handle: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return run_on_all(handle.worker_group, method, *args, **kwargs)[0]

    return call


def phase(method: Callable[[Any], R]) -> Callable[..., R]:
    """Like `on_all_workers`, for methods without arguments. Ignores arguments, like NeMo-RL."""
    call = on_all_workers(method)
    return functools.wraps(method)(lambda handle, *args, **kwargs: call(handle))


def scored_rows(
    method: Callable[Concatenate[Any, P], BatchedDataDict],
    columns: Sequence[str],
    optional: Sequence[str] = (),
) -> Callable[Concatenate[Any, P], BatchedDataDict]:
    """Return a method of a handle, such as `Policy`, that scores a batch with all workers.

    The scores have the row order of the batch. ``method``: worker method with the parameters
    ``data`` (a shard) and ``micro_batch_size``. ``columns``: columns that the workers get
    (`columns_of`). ``optional``: columns that they get if the batch contains them.
    """

    @functools.wraps(method)
    def call(handle: Any, /, *args: P.args, **kwargs: P.kwargs) -> BatchedDataDict:
        arguments = named_arguments(method, *args, **kwargs)
        data = arguments.pop("data")
        present = [name for name in optional if isinstance(data, Mapping) and name in data]
        rows = columns_of(data, [*columns, *present])
        batching = micro_batching(
            handle.model, training=False, micro_batch_size=arguments.get("micro_batch_size")
        )
        results, order = run_sharded(
            handle.worker_group, method, rows, batching=batching, **arguments
        )
        scores: BatchedDataDict = BatchedDataDict.from_batches(results)
        scores.reorder_data(order)
        return scores

    return call


def named_arguments(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, without self."""
    signature = inspect.signature(method)
    signature.bind(None, *args, **kwargs)  # raises TypeError in this process, not in a worker
    return dict(zip(list(signature.parameters)[1:], args, strict=False)) | kwargs


def start_on_all(
    group: WorkerGroup, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
) -> WorkerFuture:
    """Start ``method`` with the same arguments on all workers. Return a future."""
    arguments = named_arguments(method, *args, **kwargs)
    return group.run_all_workers_single_data(method.__name__, **arguments)


def run_on_all(
    group: WorkerGroup, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
) -> list[R]:
    """Call ``method`` with the same arguments on all workers. Return one result per worker."""
    return group.get_all_worker_results(start_on_all(group, method, *args, **kwargs))


def run_sharded(
    group: WorkerGroup,
    method: Callable[..., R],
    data: BatchedDataDict,
    batch_size: int | None = None,
    batching: MicroBatching | None = None,
    **kwargs: Any,
) -> tuple[list[R], list[int]]:
    """Call a worker method with one shard of ``data`` per data-parallel rank.

    Returns (results, order): one result per rank, and for each row of the concatenated results its
    index in ``data``.

    ``batch_size``: number of rows in a global batch, which is split evenly over the ranks. None
    means that rows are independent, so shards may be uneven or empty. ``batching``: result of
    `micro_batching`. ``kwargs``: other arguments of the method.
    """
    result: Any = data.shard_by_batch_size(
        group.sharding_annotations.shape["data_parallel"],
        batch_size=batch_size,
        allow_uneven_shards=batch_size is None,
        **(batching or {}),
    )
    # With micro-batches, rows are moved between shards.
    shards, order = result if batching else (result, list(range(data.size)))
    # Model-parallel ranks get the same shard and return the same result.
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
    """Return the arguments of `shard_by_batch_size` for micro-batches with a limit of tokens.

    Returns {} if there is no such limit, ``micro_batch_size`` is given, or ``model`` is None (the
    workers form micro-batches). ``training``: use the limit for training, otherwise the limit for
    log-probs and values. ``rows_per_group``: number of adjacent rows in the same micro-batch.
    """
    if model is None or model.token_budgets is None or micro_batch_size is not None:
        return {}
    # Maximum number of tokens in a micro-batch.
    budgets = model.token_budgets
    max_tokens = budgets.train_mb_tokens
    if not training and budgets.logprob_mb_tokens is not None:
        max_tokens = budgets.logprob_mb_tokens
    arguments: Any = {
        "max_tokens_per_microbatch": max_tokens,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "rows_per_group": rows_per_group,
        "shared_prefixes": model.shared_prefixes and model.dropout == 0.0,  # not with dropout
    }
    if model.sequence_packing.enabled is True:
        arguments["algorithm"] = model.sequence_packing.algorithm
        arguments["sequence_length_pad_multiple"] = model.parallel.sequence_multiple
        return {"sequence_packing_args": arguments}
    multiple = model.parallel.row_multiple(model.sequence_length_round)
    arguments["sequence_length_round"] = multiple
    return {"dynamic_batching_args": arguments}


@dataclass(frozen=True)
class LocalFuture:
    """Results of a call that has ended."""

    results: list[Any]

    def get_results(self) -> list[Any]:
        """Return the results."""
        return self.results


class LocalWorkerGroup:
    """Worker group without Ray: each process of a torch.distributed world calls its own worker."""

    is_healthy = True  # calls run in this process, so no worker can be left waiting

    def __init__(self, worker: Any, parallel: ParallelState) -> None:
        self.worker, self.parallel, sizes = worker, parallel, parallel.config
        self.sharding_annotations = layout_of(
            sizes.pipeline, parallel.dp_size, sizes.context, sizes.tensor
        )

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> LocalFuture:
        """Call a method of this process's worker. All processes must call this together."""
        return LocalFuture([getattr(self.worker, method_name)(**kwargs)])

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        data: Sequence[SlicedDataDict],
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str],
        output_is_replicated: Sequence[str],
        common_kwargs: Mapping[str, Any] | None = None,
    ) -> LocalFuture:
        """Call a method with this rank's shard. Return the results of all data-parallel ranks."""
        size = self.parallel.dp_size
        other_axes = [*replicate_on_axes, *output_is_replicated]
        is_data_parallel = list(in_sharded_axes) == ["data_parallel"] and len(data) == size
        if not is_data_parallel or set(other_axes) - set(MODEL_AXES):
            raise WorkerError(
                f"{method_name}: in_sharded_axes={list(in_sharded_axes)} must be "
                f"['data_parallel'], the other axes {other_axes} must be in {MODEL_AXES}, and one "
                f"shard per rank is needed, got {len(data)} shards for {size} data-parallel ranks"
            )
        # Call this process's worker, and exchange results or errors with data-parallel ranks.
        arguments = {"data": data[self.parallel.dp_rank], **(common_kwargs or {})}
        if size == 1:
            return LocalFuture([getattr(self.worker, method_name)(**arguments)])
        try:
            result = to_host(getattr(self.worker, method_name)(**arguments))
        except Exception as error:
            # The other ranks wait for this rank's result, so send the error. It must be picklable.
            text = f"{method_name} failed on rank {self.parallel.rank}: {type(error).__name__}"
            message = error if isinstance(error, AlignerError) else WorkerError(f"{text}: {error}")
            gather_objects(message, self.parallel.dp_group)
            raise
        results = gather_objects(result, self.parallel.dp_group)
        for result in results:
            if isinstance(result, AlignerError):
                raise result
        return LocalFuture(results)

    def get_all_worker_results(self, future: WorkerFuture) -> list[Any]:
        """Return the results of a call, in data-parallel order."""
        return future.get_results()

    def recover(self) -> bool:
        """Return True. A failed call raises its error on all ranks, so no worker is waiting."""
        return True

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Call ``cleanup_method`` on this process's worker. Return True. The process continues."""
        if cleanup_method is not None:
            getattr(self.worker, cleanup_method)()
        return True


class LocalCluster:
    """Cluster without Ray: the processes that torchrun or the script started, or this one alone."""

    engine = "local"

    def __init__(self, parallel: ParallelState) -> None:
        self.parallel = parallel

    @property
    def use_gpus(self) -> bool:
        """True if the processes compute on GPUs."""
        return accelerator.has_gpu()

    def start_workers(
        self,
        worker_class: str,
        name_prefix: str,
        *,
        parallel: ParallelConfig | None = None,
        workers_per_node: int | Sequence[int] | None = None,
        env_vars: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> LocalWorkerGroup:
        """Construct ``worker_class(parallel=..., **kwargs)`` in this process.

        ``env_vars`` remain set after the call. Raises `LayoutError` if ``parallel`` differs from
        the layout of the processes, and `ConfigError` if ``workers_per_node`` differs from the
        number of processes on this machine.
        """
        # The processes exist already, so the arguments must agree with them.
        if parallel is not None and parallel != self.parallel.config:
            raise LayoutError(
                f"{name_prefix}: the layout {parallel} differs from the layout of the processes, "
                f"{self.parallel.config}. Use one layout for all roles, or set cluster.engine=ray"
            )
        local_count = int(os.environ.get("LOCAL_WORLD_SIZE", self.parallel.world_size))
        counts = [workers_per_node] if isinstance(workers_per_node, int) else workers_per_node
        if counts is not None and set(counts) != {local_count}:
            raise ConfigError(
                f"workers_per_node={workers_per_node}, but without Ray the workers are the "
                f"{local_count} processes of this machine. Leave it out, or use a RayVirtualCluster"
            )
        os.environ.update({key: str(value) for key, value in (env_vars or {}).items()})
        # "package.module.Class" is resolved as "package.module:Class".
        constructor = pkgutil.resolve_name(":".join(worker_class.rsplit(".", 1)))
        try:
            worker = constructor(parallel=self.parallel, **kwargs)
        except AlignerError as error:
            error.add_note(f"while starting {name_prefix} on rank {self.parallel.rank}")
            raise
        return LocalWorkerGroup(worker, self.parallel)

    def world_size(self) -> int:
        """Return the number of processes."""
        return self.parallel.world_size


def to_host(value: Any) -> Any:
    """Return ``value`` with every tensor copied to host memory, so that it can be pickled."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return type(value)({key: to_host(item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list):
        return [to_host(item) for item in value]
    return value
