"""Calls of a role's workers by its handle, and the workers in this process or of torchrun.

A handle (``Policy``, ``Value``) gives a group one shard of data per data-parallel coordinate and
gets one result per data-parallel coordinate back. In ``LocalWorkerGroup`` this process is one of
the workers, and the handles run in every process alike:

    handle in rank 0         handle in rank 1           (same global batch in both)
      | shard 0                | shard 1
    worker 0                 worker 1                   worker method, collectives inside it
      | result 0               | result 1
      +------ all-gather over data parallel ------+
    [result 0, result 1]     [result 0, result 1]

Consumes: the shards, the data-parallel process group. Waits for: the same call on every rank;
the process group's timeout ends the wait. An exception on one rank is raised on all ranks of its
data-parallel group, with the rank's name, once its worker method has returned there.

A handle declares what it only passes on: a call of every worker, or on shards of a batch whose rows
are scored. Name, signature and docstring are those of the worker method::

    prepare_for_training = phase(RoleWorker.prepare_for_training)
    num_parameters = on_all_workers(RoleWorker.num_parameters)
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
import torch.distributed as dist

from aligner.config import TrainedModelConfig
from aligner.config.layout import ParallelConfig
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict, columns_of
from aligner.distributed.interfaces import WorkerFuture, WorkerGroup
from aligner.distributed.named_sharding import MODEL_AXES, NamedSharding, layout_of
from aligner.distributed.sharding import MicroBatching
from aligner.errors import AlignerError, ConfigError, LayoutError, WorkerError
from aligner.parallel.groups import ParallelState

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
    shards: Any = data.shard_by_batch_size(
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


@dataclass(frozen=True)
class LocalFuture:
    """Results of a call that has been made already."""

    results: list[Any]

    def get_results(self) -> list[Any]:
        """The results."""
        return self.results


@dataclass(frozen=True)
class _Failure:
    """An exception on its way to the other ranks.

    ``error`` is the exception itself where it is ours; others may not survive being sent, and a
    rank that cannot send would leave its peers waiting.
    """

    rank: int
    words: str
    error: AlignerError | None


def _places(parallel: ParallelState) -> NamedSharding:
    config = parallel.config
    return layout_of(config.pipeline, parallel.dp_size, config.context, config.tensor)


class LocalWorkerGroup:
    """This process is one worker; its peers are the processes started beside it."""

    is_whole = True  # a call here is made in this process, which is not waiting

    def __init__(self, worker: Any, parallel: ParallelState) -> None:
        self.worker = worker
        self.parallel = parallel
        self.sharding_annotations = _places(parallel)

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> LocalFuture:
        """Call ``method_name(**kwargs)`` here; every process does the same with its worker."""
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
        """Call ``method_name(data=my shard, **common_kwargs)`` here and gather over data parallel.

        Every axis is either sharded or replicated; the result of a worker is the same along
        ``output_is_replicated`` (worker methods see to it), so one per data rank is returned.
        """
        if list(in_sharded_axes) != ["data_parallel"]:
            raise WorkerError(
                f"data can be sharded over data_parallel alone, not {list(in_sharded_axes)}"
            )
        for name in (*replicate_on_axes, *output_is_replicated):
            if name not in MODEL_AXES:
                raise WorkerError(f"cannot replicate over {name!r}; the axes are {MODEL_AXES}")
        if len(data) != self.parallel.dp_size:
            raise WorkerError(
                f"{method_name}: {len(data)} shards for {self.parallel.dp_size} data-parallel ranks"
            )
        arguments = {"data": data[self.parallel.dp_rank], **(common_kwargs or {})}
        if self.parallel.dp_size == 1:
            return LocalFuture([getattr(self.worker, method_name)(**arguments)])

        def gather(mine: Any) -> list[Any]:
            results: list[Any] = [None] * self.parallel.dp_size
            dist.all_gather_object(results, mine, group=self.parallel.dp_group)
            return results

        return self._shared(method_name, arguments, gather)

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int = 0, **kwargs: Any
    ) -> LocalFuture:
        """Call a method in the process of rank ``worker_idx``; its result, in every process."""
        if self.parallel.world_size == 1:
            return LocalFuture([getattr(self.worker, method_name)(**kwargs)])

        def broadcast(mine: Any) -> list[Any]:
            box = [mine]
            dist.broadcast_object_list(box, src=worker_idx)
            return box

        return self._shared(
            method_name, kwargs if self.parallel.rank == worker_idx else None, broadcast
        )

    def get_all_worker_results(self, future: WorkerFuture) -> list[Any]:
        """Results of a call, in data-parallel order."""
        return future.get_results()

    def recover(self) -> bool:
        """True: a sharded call that failed on one rank has returned, and was raised, on all."""
        return True

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Call ``cleanup_method`` on this process's worker; the process itself lives on."""
        if cleanup_method is not None:
            getattr(self.worker, cleanup_method)()
        return True

    def _shared(
        self,
        method_name: str,
        arguments: Mapping[str, Any] | None,
        exchange: Callable[[Any], list[Any]],
    ) -> LocalFuture:
        """Results of ranks that ``exchange`` them; None as ``arguments``: this rank has none."""
        mine: Any = None
        try:
            if arguments is not None:
                mine = to_host(getattr(self.worker, method_name)(**arguments))
        except Exception as error:
            own = error if isinstance(error, AlignerError) else None
            exchange(_Failure(self.parallel.rank, f"{type(error).__name__}: {error}", own))
            raise
        results = exchange(mine)
        for result in results:
            if isinstance(result, _Failure):
                raise result.error or WorkerError(
                    f"{method_name} failed on rank {result.rank}: {result.words}"
                )
        return LocalFuture(results)


class LocalCluster:
    """The processes that torchrun or Lightning's launcher started, or this one by itself."""

    engine = "local"

    def __init__(self, parallel: ParallelState) -> None:
        self.parallel = parallel

    @property
    def use_gpus(self) -> bool:
        """True if the processes compute on GPUs."""
        return accelerator.has_gpu()

    @property
    def sharding_annotations(self) -> NamedSharding:
        """Places of the processes."""
        return _places(self.parallel)

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

        Args:
            worker_class: dotted path.
            name_prefix: role, for messages.
            parallel: the configured layout; it must be that of the processes.
            workers_per_node: must be what was started on each machine.
            env_vars: set in this process, where they last.
            kwargs: arguments of the class.
        """
        if parallel is not None and parallel != self.parallel.config:
            raise LayoutError(
                f"{name_prefix}: the processes are laid out as {self.parallel.config}, the "
                f"configuration says {parallel}; give both the same, or use a RayVirtualCluster, "
                "where every role has its own layout"
            )
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.parallel.world_size))
        wanted = [workers_per_node] if isinstance(workers_per_node, int) else workers_per_node
        if wanted is not None and set(wanted) != {here}:
            raise ConfigError(
                f"workers_per_node={workers_per_node}: the processes are the workers, and {here} "
                "were started on this machine; leave it out, or use a RayVirtualCluster"
            )
        os.environ.update({key: str(value) for key, value in (env_vars or {}).items()})
        constructor = pkgutil.resolve_name(":".join(worker_class.rsplit(".", 1)))
        try:
            worker = constructor(parallel=self.parallel, **kwargs)
        except AlignerError as error:
            error.add_note(f"while starting {name_prefix} on rank {self.parallel.rank}")
            raise
        return LocalWorkerGroup(worker, self.parallel)

    def world_size(self) -> int:
        """Number of processes."""
        return self.parallel.world_size


def to_host(value: Any) -> Any:
    """``value`` with every tensor in it on the host, ready to be sent as an object."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return type(value)({key: to_host(item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list):
        return [to_host(item) for item in value]
    return value
