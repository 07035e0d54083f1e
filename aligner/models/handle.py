"""`RoleHandle`: base class of the handles `Policy`, `Value` and `RewardModel`."""

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from aligner.config import CriticConfig, TrainedModelConfig
from aligner.device.accelerator import DeviceInfo, MemoryUse
from aligner.distributed.batched_data_dict import BatchedDataDict, check_columns
from aligner.distributed.interfaces import Cluster, WorkerGroup
from aligner.distributed.workers import (
    micro_batching,
    on_all_workers,
    phase,
    run_on_all,
    run_sharded,
)
from aligner.errors import ConfigError, StorageError
from aligner.losses.interfaces import AnyLossFunction
from aligner.models.worker import RoleWorker

_log = logging.getLogger(__name__)
TRAINED_COLUMNS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


class RoleHandle:
    """Starts and calls the workers of one role. Its methods accept and return global batches.

    Each data-parallel rank gets a part of the rows.
    """

    workers: ClassVar[Mapping[str, str]]  # dotted path of the worker class for each backend

    def __init__(
        self,
        cluster: Cluster,
        config: TrainedModelConfig | CriticConfig,
        model: TrainedModelConfig,
        name_prefix: str,
        backend: str,
        weights_path: str | os.PathLike[str] | None,
        optimizer_path: str | os.PathLike[str] | None,
        /,
        **arguments: Any,
    ) -> None:
        """Start the workers on ``cluster``.

        ``config``: the role's section, with the default batch sizes of `train`. ``model``: the
        policy's section, with layout and token budgets for all roles. ``arguments``: additional
        arguments of `Cluster.start_workers` and of the worker class. For the others see `Policy`.
        """
        if backend not in self.workers:
            raise ConfigError(f"policy.backend={backend} must be one of {', '.join(self.workers)}")
        paths = absolute_paths(weights_path=weights_path, optimizer_path=optimizer_path)
        self.worker_group = cluster.start_workers(
            self.workers[backend], name_prefix, config=config, **paths, **arguments
        )
        self.sharding_annotations = self.worker_group.sharding_annotations
        self.config = config
        self.model = model

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: AnyLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Run one epoch over ``data``, with one optimizer step for every ``gbs`` rows.

        Args:
            data: columns that ``loss_fn`` and the role read. A missing column raises `DataError`.
            loss_fn: a loss of `aligner.losses`, or a loss with NeMo-RL's interface
                (see `aligner.losses.interfaces`).
            eval_mode: whether to run forward passes only, without updates.
            gbs: number of rows of a global mini-batch, over all ranks. Default: as configured.
            mbs: number of rows per micro-batch. Rows that ``loss_fn`` compares must be in one
                micro-batch. Default: as configured.

        Returns:
            ``loss`` and ``grad_norm`` (means over the steps), ``lr`` of the last step, ``skipped``
            (whether a step was skipped because loss or gradient was not finite) and
            ``all_mb_metrics`` (for each metric a list with one value per step).
        """
        # Rows that the loss compares stay in one micro-batch, of a token budget or of ``mbs`` rows.
        check_columns(data, TRAINED_COLUMNS)
        gbs = gbs or self.config.global_batch_size
        group = int(getattr(loss_fn, "rows_per_group", 1))
        batching = micro_batching(
            self.model, training=True, micro_batch_size=mbs, rows_per_group=group
        )
        mbs = mbs or self.config.micro_batch_size
        if not batching:
            check_whole_groups(self.worker_group, gbs, mbs, group)
        # Every worker trains on its rows, and all return the same result.
        results, _ = run_sharded(
            self.worker_group,
            RoleWorker.train,
            data,
            batch_size=gbs,
            batching=batching,
            loss_fn=loss_fn,
            eval_mode=eval_mode,
            gbs=gbs,
            mbs=mbs,
        )
        first = dict(results[0])  # equal on all workers
        return {"loss": first.pop("global_loss"), **first}

    prepare_for_training = phase(RoleWorker.prepare_for_training)
    finish_training = phase(RoleWorker.finish_training)
    prepare_for_inference = phase(RoleWorker.prepare_for_inference)
    finish_inference = phase(RoleWorker.finish_inference)

    has_finite_weights = on_all_workers(RoleWorker.has_finite_weights)
    way_in_words = on_all_workers(RoleWorker.way_in_words)
    reset_peak_memory = on_all_workers(RoleWorker.reset_peak_memory)
    start_gpu_profiling = on_all_workers(RoleWorker.start_gpu_profiling)
    stop_gpu_profiling = on_all_workers(RoleWorker.stop_gpu_profiling)

    def device_info(self) -> DeviceInfo:
        """Return the first worker's device, with the minimum of the workers' free memory."""
        devices = run_on_all(self.worker_group, RoleWorker.device_info)
        return replace(devices[0], free_bytes=min(device.free_bytes for device in devices))

    def memory_use(self) -> list[MemoryUse]:
        """Measure each worker's memory use, with peaks since `reset_peak_memory`."""
        return run_on_all(self.worker_group, RoleWorker.memory_use)

    # State ------------------------------------------------------------------------------------

    prepare_saving = on_all_workers(RoleWorker.prepare_saving)

    @property
    def num_shares(self) -> int:
        """Number of workers. Each of them writes a part of a run state."""
        return self.sharding_annotations.size

    def begin_saving(self, folder: Path, in_background: bool) -> None:
        """Write the present run state of every worker to ``folder`` (see `ShareWriter`).

        ``in_background``: copy the state and return. Threads of the workers write the copy, and
        `check_saving` raises their errors.
        """
        run_on_all(
            self.worker_group, RoleWorker.begin_saving, str(folder.absolute()), in_background
        )

    def check_saving(self, wait: bool) -> None:
        """Raise an error of writing in the background. ``wait``: first wait until it has ended."""
        if not self.worker_group.is_healthy:
            return
        for failure in run_on_all(self.worker_group, RoleWorker.saving_failure, wait):
            if failure is not None:
                raise StorageError(failure)

    def load_state(self, folder: Path) -> None:
        """Load a run state that `begin_saving` wrote. The parallel layout may have changed."""
        run_on_all(self.worker_group, RoleWorker.load_state, str(folder.absolute()))

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write model, optimizer state and tokenizer to paths that all machines can access.

        ``weights_path``: a ``.nemo`` file, or without this suffix a Hugging Face directory.
        ``optimizer_path``: directory for float32 weights, moments and step, one file per worker. A
        handle started with both paths continues from this state, on any layout.
        ``tokenizer_path``: directory for the tokenizer's files.
        """
        paths = absolute_paths(
            weights_path=weights_path, optimizer_path=optimizer_path, tokenizer_path=tokenizer_path
        )
        run_on_all(self.worker_group, RoleWorker.save_checkpoint, **paths)

    def shutdown(self) -> bool:
        """Stop the workers, and return whether they stopped without an error."""
        try:
            return self.worker_group.shutdown(cleanup_method="shutdown")
        except Exception as error:
            _log.warning("shutdown: %s: %s", type(error).__name__, error)
            return False

    def __del__(self) -> None:
        """Stop workers that are still running. Prefer `shutdown`, which lets them clean up."""
        if sys.is_finalizing() or "worker_group" not in self.__dict__:
            return
        with contextlib.suppress(Exception):
            self.worker_group.shutdown()


def check_whole_groups(
    group: WorkerGroup, batch_size: int, micro_batch_size: int, rows_per_group: int
) -> None:
    """Raise `ConfigError` if micro-batches would separate rows of a group of adjacent rows."""
    if rows_per_group == 1:
        return
    ranks = group.sharding_annotations.get_axis_size("data_parallel")
    if batch_size % (ranks * rows_per_group) or micro_batch_size % rows_per_group:
        raise ConfigError(
            f"{rows_per_group} adjacent rows must stay together. They would be split by "
            f"global_batch_size={batch_size}, {ranks} data-parallel ranks and "
            f"micro_batch_size={micro_batch_size}. Set global_batch_size to a multiple of "
            f"{ranks * rows_per_group} and micro_batch_size to a multiple of {rows_per_group}"
        )


def absolute_paths(**paths: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return absolute paths, which workers can use in any directory, without those of None."""
    return {name: os.path.abspath(path) for name, path in paths.items() if path is not None}
