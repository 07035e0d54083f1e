"""`RoleFront`: what the fronts of policy and critic have in common.

A front takes and returns global batches; its workers see their data-parallel shares.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.cluster.sharded import (
    check_columns,
    check_whole_groups,
    micro_batching,
    run_on_all,
    run_sharded,
    train_result,
)
from aligner.cluster.worker_groups import WorkerGroup
from aligner.config import CriticConfig, TrainedModelConfig
from aligner.distributed.accelerator import DeviceFacts, MemoryUse
from aligner.errors import ConfigError, StorageError
from aligner.kernels.counter_hash import counter_hash
from aligner.losses.interfaces import LossFunction as PublishedLossFunction
from aligner.losses.interfaces import as_loss
from aligner.types import LossFunction

_log = logging.getLogger(__name__)
TRAINED_COLUMNS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


class RoleFront:
    """Training, phases, state and the end of a group of workers that hold one role.

    Args:
        worker_group: the workers.
        config: the role's section; its batch sizes are the defaults of `train`.
        model: the policy's section; layout and token budgets that all roles share.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: TrainedModelConfig | CriticConfig,
        model: TrainedModelConfig,
    ) -> None:
        self.worker_group = worker_group
        self.sharding_annotations = worker_group.sharding_annotations
        self.config = config
        self.model = model

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction | PublishedLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One pass over ``data``: one optimizer step for every ``gbs`` rows.

        ``loss_fn``: one of `aligner.algorithms.losses`, or as NeMo-RL publishes them: a function of
        (logits, data, global_valid_seqs, global_valid_toks); see
        `aligner.losses.interfaces`.

        Micro-batches are of ``mbs`` rows where it is given, else as configured; none
        cuts through rows that ``loss_fn`` compares. Returns ``loss`` and ``grad_norm`` of the pass,
        ``lr``, ``skipped`` (whether a step was left out because it was not finite) and
        ``all_mb_metrics``: by name, one value per optimizer step, reduced over the global
        mini-batch.

        Raises:
            DataError: one of `TRAINED_COLUMNS` is absent.
        """
        check_columns(data, TRAINED_COLUMNS)
        loss_fn = as_loss(loss_fn)
        gbs = gbs or self.config.global_batch_size
        group = loss_fn.rows_per_group
        batching = micro_batching(
            self.model, training=True, micro_batch_size=mbs, rows_per_group=group
        )
        mbs = mbs or self.config.micro_batch_size
        if not batching:
            check_whole_groups(self.worker_group, gbs, mbs, group)
        results, _ = run_sharded(
            self.worker_group,
            "train",
            data,
            batch_size=gbs,
            batching=batching,
            loss_fn=loss_fn,
            eval_mode=eval_mode,
            gbs=gbs,
            mbs=mbs,
        )
        return train_result(results)

    def device_facts(self) -> DeviceFacts:
        """Devices that the workers compute on: the first one's words, the least memory of all."""
        facts = run_on_all(self.worker_group, "device_facts")
        return replace(facts[0], free_bytes=min(each.free_bytes for each in facts))

    def memory_use(self) -> list[MemoryUse]:
        """Memory of every worker that is called from here, at most since `reset_peak_memory`."""
        return run_on_all(self.worker_group, "memory_use")

    def reset_peak_memory(self) -> None:
        """Have the workers look for peaks anew."""
        run_on_all(self.worker_group, "reset_peak_memory")

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Ready the workers to train; optimizer state returns to the device."""
        run_on_all(self.worker_group, "prepare_for_training")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Leave training; optimizer state may leave the device."""
        run_on_all(self.worker_group, "finish_training")

    def prepare_for_inference(self) -> None:
        """Ready the workers to answer: evaluation mode, so without dropout."""
        run_on_all(self.worker_group, "prepare_for_inference")

    def finish_inference(self) -> None:
        """Leave inference."""
        run_on_all(self.worker_group, "finish_inference")

    def save_state(self, folder: Path) -> None:
        """Have every worker write its share of weights, optimizer and schedule to ``folder``."""
        run_on_all(self.worker_group, "save_state", folder=str(folder.absolute()))

    @property
    def num_shares(self) -> int:
        """Workers, each of which writes a share of a run state."""
        return self.sharding_annotations.size

    def prepare_saving(self) -> None:
        """Have every worker take the memory of a copy of its share; see `ShareWriter`."""
        run_on_all(self.worker_group, "prepare_saving")

    def begin_saving(self, folder: Path, in_background: bool) -> None:
        """Have every worker write its share as it is now; see `ShareWriter`.

        In the background only copies are taken until this returns. Whoever calls it seals the
        folder (`worker_state.seal`).
        """
        run_on_all(
            self.worker_group,
            "begin_saving",
            folder=str(folder.absolute()),
            in_background=in_background,
        )

    def check_saving(self, wait: bool) -> None:
        """Raise what writing in the background has failed with; ``wait``: until it is over.

        Nothing is asked of workers that may wait for one another since a call failed.
        """
        if not self.worker_group.is_whole:
            return
        for failure in run_on_all(self.worker_group, "saving_failure", wait=wait):
            if failure is not None:
                raise StorageError(failure)

    def load_state(self, folder: Path) -> None:
        """Inverse of `save_state`, whatever layout wrote it."""
        run_on_all(self.worker_group, "load_state", folder=str(folder.absolute()))

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write the role; the workers do, so every machine must see these paths.

        Args:
            weights_path: a ``.nemo`` file, which holds configuration and tokenizer too; a path
                without that suffix becomes a Hugging Face directory.
            optimizer_path: directory for the optimizer's state. A front that is started with both
                paths continues from there, on any layout.
            tokenizer_path: directory for the tokenizer's files.
        """
        paths = checkpoint_paths(weights_path, optimizer_path, tokenizer_path)
        run_on_all(self.worker_group, "save_checkpoint", **paths)

    def has_finite_weights(self) -> bool:
        """Return whether no weight of the role is NaN or infinite."""
        return all(run_on_all(self.worker_group, "has_finite_weights"))

    def num_parameters(self) -> int:
        """Parameters of the whole role."""
        return run_on_all(self.worker_group, "num_parameters")[0]

    def start_gpu_profiling(self) -> None:
        """Begin a capture range of the CUDA profiler on every worker; nothing without a GPU."""
        run_on_all(self.worker_group, "start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """End the capture range."""
        run_on_all(self.worker_group, "stop_gpu_profiling")

    def shutdown(self) -> bool:
        """End the workers; whether that went well."""
        try:
            return self.worker_group.shutdown(cleanup_method="shutdown")
        except Exception as error:
            _log.warning("shutdown: %s: %s", type(error).__name__, error)
            return False

    def __del__(self) -> None:
        """End workers that nobody has ended. Rather call `shutdown`: it lets them clean up."""
        if sys.is_finalizing() or "worker_group" not in self.__dict__:
            return
        with contextlib.suppress(Exception):
            self.worker_group.shutdown()


class CallSeeds:
    """Seeds for calls that are given none: of the run's seed and the number of the call."""

    def __init__(self, seed: int) -> None:
        self._seed, self._calls = seed, 0

    def next(self) -> int:
        """The next call's."""
        self._calls += 1
        return int(counter_hash(self._seed, torch.tensor(self._calls)))


def checkpoint_paths(
    weights_path: str | os.PathLike[str] | None,
    optimizer_path: str | os.PathLike[str] | None,
    tokenizer_path: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """The paths that are given, absolute: a worker may have another working directory."""
    paths = {
        "weights_path": weights_path,
        "optimizer_path": optimizer_path,
        "tokenizer_path": tokenizer_path,
    }
    return {key: os.path.abspath(path) for key, path in paths.items() if path is not None}


def worker_class(workers: Mapping[str, str], backend: str) -> str:
    """Dotted path of the worker class that serves a role on ``backend``."""
    if backend not in workers:
        raise ConfigError(f"policy.backend={backend}: use one of {', '.join(workers)}")
    return workers[backend]
