"""Folder of a role in a run state, with one file per worker: the worker's share of the state.

``rank_00000.pt`` is a share. Once it is on the disk, the worker writes the share's size and
checksum to ``rank_00000.done``, called its mark. Rank 0 polls for all marks, because no collective
may run during training, and replaces them by ``checksums.json``.

A worker writes its share immediately, or copies it and writes the copy in a thread::

    worker    begin: copy the share ── training continues ── failure: return the thread's error
    thread         └ write rank_N.pt ── flush ── rename rank_N.done
    rank 0                                          └ seal: wait for all marks, write checksums
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aligner.checkpoint.background import AbandonedError, BackgroundTask, CopyMemory
from aligner.checkpoint.durable import atomic_file, readable_bytes, require_free_space, write_json
from aligner.checkpoint.run_state.files import (
    CHECKSUMS,
    check_files,
    raised_on_all,
    read_checksums,
    replace_folder,
)
from aligner.checkpoint.run_state.tree import (
    bytes_to_copy,
    capture_rng,
    copied,
    estimate_bytes,
    map_tensors,
    normalise,
    read_tree,
    restore_rng,
    write_tree,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.device.host_memory import available_bytes
from aligner.errors import CheckpointNotFoundError, DamagedStateError, StorageError
from aligner.parallel.collectives import gather_objects, on_rank_zero
from aligner.parallel.groups import ParallelState

_POLL_S = 0.02  # interval of polling for another worker's mark
_log = logging.getLogger(__name__)


class StatefulWorker(Protocol):
    """Worker of a role that has a share of the role's state."""

    parallel: ParallelState

    def state_dict(self) -> Mapping[str, Any]:
        """Return this worker's part of the role's state, as a tree (`run_state.tree`)."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state. ``states[r]``: the `state_dict` of rank r in the saved run."""


class ShareWriter:
    """Writer of a worker's share of a run state, immediately or in the background."""

    def __init__(self, worker: StatefulWorker) -> None:
        self._worker = worker
        self._memory = CopyMemory()
        self._task: BackgroundTask | None = None
        self._has_warned = False

    def prepare(self) -> None:
        """Start a thread that allocates memory for a copy. Allocation takes longer than copying."""
        size = bytes_to_copy(_share_of(self._worker))
        if self._task is not None or not self._has_memory(size):
            return

        def allocate(stop: threading.Event) -> None:
            self._memory.clear(size)
            self._memory.touch(stop)

        self._task = BackgroundTask(allocate, f"memory for the run state of rank {self._rank}")

    def begin(self, folder: str, in_background: bool) -> None:
        """Write the current share to ``folder``, on a disk that all workers share.

        With ``in_background`` and enough host memory, copy the share and let a thread write it.
        Raises `StorageError` if this share or the previous share cannot be written.
        """
        if (failure := self.failure(wait=True)) is not None:
            raise StorageError(failure)
        # Copy the share if there is memory, else write it before returning.
        target, rank = Path(folder), self._rank
        tree = map_tensors(_share_of(self._worker), lambda tensor: tensor, "worker")
        target.mkdir(exist_ok=True)
        is_copied = in_background and self._has_memory(size := bytes_to_copy(tree))
        if is_copied:
            self._memory.clear(size)
            tree = copied(tree, self._memory)
        else:
            tree = normalise(tree, "worker")
        require_free_space(target, estimate_bytes(tree))
        write = partial(_write_share, target, rank, tree)
        if is_copied:
            self._task = BackgroundTask(write, f"run state of rank {rank}")
        else:
            write()

    def failure(self, wait: bool) -> str | None:
        """Return the error text of the last write, or None. ``wait``: first wait for its end."""
        task = self._task
        if task is None or not (task.wait() if wait else task.is_finished):
            return None
        self._task = None
        if task.error is None or isinstance(task.error, StorageError):
            return None if task.error is None else str(task.error)
        return f"{type(task.error).__name__}: {task.error}"

    @property
    def _rank(self) -> int:
        return self._worker.parallel.rank

    def _has_memory(self, size: int) -> bool:
        """Return whether the host has ``size`` bytes for a copy. Log a lack of memory once."""
        local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", self._worker.parallel.world_size))
        free = available_bytes() // max(1, local_workers)
        if size <= free + self._memory.size:
            return True
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a copy of the run state needs %s of host memory for this process, but %s are "
                "free: training waits until the state is written",
                *map(readable_bytes, (size, free)),
            )
        return False


def _share_of(worker: StatefulWorker) -> dict[str, Any]:
    parallel = worker.parallel
    return {
        "state": worker.state_dict(),
        "world_size": parallel.world_size,
        "layout": parallel.layout_in_words,
        "rng": capture_rng(accelerator.rng_state),
    }


def _write_share(target: Path, rank: int, tree: Any, stop: threading.Event | None = None) -> None:
    share = target / _name(rank)
    checksum = write_tree(share, tree, stop)
    unsealed = target / f".{_mark(rank)}.partial"
    write_json(unsealed, {"checksum": checksum, "size": share.stat().st_size})
    # This is the last access to the folder, because rank 0 may rename it after `seal`.
    os.replace(unsealed, target / _mark(rank))


def seal(folder: Path, num_shares: int, stop: threading.Event | None = None) -> None:
    """Wait until all workers have written their shares, and write `CHECKSUMS` of the shares.

    A worker marks the end of its share by a file, which is removed. Raises `AbandonedError` if
    ``stop`` is set, `DamagedStateError` if a share's size is wrong.
    """
    checksums = {}
    for rank in range(num_shares):
        share, mark_path = folder / _name(rank), folder / _mark(rank)
        # Poll for the mark, which any machine may write.
        while not mark_path.exists():
            if stop is None:
                time.sleep(_POLL_S)
            elif stop.wait(_POLL_S):
                raise AbandonedError(f"{mark_path} was not written")
        mark = json.loads(mark_path.read_bytes())
        if share.stat().st_size != mark["size"]:
            raise DamagedStateError(
                f"{share} has {share.stat().st_size} bytes, but {mark['size']} were written. Use a "
                "directory on a disk that all machines share"
            )
        checksums[share.name] = f"{mark['checksum']:08x}"
    write_json(folder / CHECKSUMS, checksums)
    for rank in range(num_shares):
        (folder / _mark(rank)).unlink()


def save_worker_state(worker: StatefulWorker, folder: str, prefix: str = "") -> None:
    """Write this worker's part of the role's state, and its random states, to ``folder``.

    All workers of the role must call this function with the same ``folder``, on a shared disk.
    ``prefix``: beginning of the error on the ranks that did not fail.
    """
    with raised_on_all(gather_objects, prefix):
        ShareWriter(worker).begin(folder, in_background=False)
    if worker.parallel.rank == 0:
        seal(Path(folder), worker.parallel.world_size)


def load_worker_state(worker: StatefulWorker, folder: str) -> None:
    """Check the files of `save_worker_state`, and restore the state in any parallel layout.

    All workers of the role must call this function. Random generators are restored only if the
    parallel layout is that of the saved run.
    """
    parallel = worker.parallel
    check_worker_states(parallel, Path(folder))
    shares = SavedShares(Path(folder), parallel.rank)
    worker.load_state_dict(shares)
    if shares.layout == parallel.layout_in_words:
        restore_rng(shares.share(parallel.rank)["rng"], accelerator.set_rng_state)


def check_worker_states(parallel: ParallelState, folder: Path) -> None:
    """Raise `DamagedStateError` if a file is damaged. Each worker checks some of the files."""
    with raised_on_all(gather_objects):
        checksums = sorted(read_checksums(folder).items())
        check_files(folder, dict(checksums[parallel.rank :: parallel.world_size]))


def save_optimizer_state(worker: StatefulWorker, folder: str) -> None:
    """Write this worker's training state to ``folder``. An error leaves no partial folder.

    All workers of the role must call this function with the same ``folder``, on a shared disk.
    """
    target = Path(folder)
    partial = target.with_name(f".{target.name}.partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir(parents=True)

    on_rank_zero(begin)
    save_worker_state(worker, str(partial), f"optimizer_path={folder} was not written: ")
    on_rank_zero(lambda: replace_folder(partial, target))


def load_optimizer_state(worker: StatefulWorker, folder: str) -> None:
    """Restore weights, moments and step from the folder of `save_optimizer_state`."""
    if not Path(folder).is_dir():
        raise CheckpointNotFoundError(
            f"optimizer_path={folder} does not exist. Give a directory that save_checkpoint wrote, "
            "or omit optimizer_path to start with a new optimizer state"
        )
    check_worker_states(worker.parallel, Path(folder))
    worker.load_state_dict(SavedShares(Path(folder), worker.parallel.rank))


def save_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Write the tokenizer's files into ``folder`` on rank 0. All ranks raise an error of rank 0."""

    def write() -> None:
        for name, content in tokenizer.files().items():
            with atomic_file(Path(folder) / name, len(content)) as file:
                file.write(content)

    on_rank_zero(write)


class SavedShares(Sequence[Mapping[str, Any]]):
    """Saved results of `StatefulWorker.state_dict`, by rank. A result is read when it is indexed.

    ``rank``: rank whose file is opened first, because it also has the saved run's layout.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._shares: dict[int, Mapping[str, Any]] = {}
        first = rank if (folder / _name(rank)).exists() else 0
        self._size = int(self.share(first)["world_size"])
        self.layout = str(self.share(first)["layout"])  # text of the parallel layout

    def share(self, rank: int) -> Mapping[str, Any]:
        """Return what rank ``rank`` wrote: its state, random states and parallel layout."""
        if rank not in self._shares:
            self._shares[rank] = read_tree(self._folder / _name(rank))
        return self._shares[rank]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: int) -> Mapping[str, Any]:  # type: ignore[override]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        state: Mapping[str, Any] = self.share(rank)["state"]
        return state


def _name(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _mark(rank: int) -> str:
    return f"rank_{rank:05d}.done"
