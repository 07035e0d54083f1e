"""Contribution of one role's workers to a run state: a folder of the role, one file per worker.

Every worker writes and reads its own file, so that nothing of the size of a model passes through
the process that runs the loop::

    rank_00000.pt    a worker's share
    rank_00000.done  its size and checksum, written once the share is on the disk
    checksums.json   of all shares, once every worker is done; the ``.done`` files are then gone

A worker writes in the step, or in a thread of its own from a copy that it takes in the step. Only
files show that a share is written: no collective is needed, and none runs during training.

Reading is memory-mapped and begins with a worker's own file: on the layout that was saved that is
all it opens, and else it touches of the others' what its own share needs.
Before any is used, the workers check them, each its share, and agree on the result.
The optimizer state that `save_checkpoint` writes beside a role's weights is such a folder, too.
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
from aligner.checkpoint.durable import atomic_file, durable_file, readable_bytes, require_free_space
from aligner.checkpoint.run_state.files import (
    check_files,
    raised_on_all,
    read_checksums,
    replace_folder,
    write_checksums,
)
from aligner.checkpoint.run_state.rng import capture_rng, restore_rng
from aligner.checkpoint.run_state.tree import (
    bytes_to_copy,
    copied,
    estimate_bytes,
    map_tensors,
    normalise,
    read_tree,
    write_tree,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.device.host_memory import available_bytes
from aligner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedStateError,
    StorageError,
)
from aligner.parallel.collectives import gather_objects, on_rank_zero
from aligner.parallel.groups import ParallelState

_LOOK_S = 0.02  # between two looks for another worker's mark
_log = logging.getLogger(__name__)


class StatefulWorker(Protocol):
    """A worker whose share of a role can be saved."""

    parallel: ParallelState

    def state_dict(self) -> Mapping[str, Any]:
        """This process's share."""
        ...

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `state_dict`, from what every worker of the saved run gave, in rank order."""
        ...


class ShareWriter:
    """Writes one worker's shares, one after the other, in the step or in the background.

    Args:
        worker: whose; nothing here waits for the others.
    """

    def __init__(self, worker: StatefulWorker) -> None:
        self._worker = worker
        self._memory = CopyMemory()
        self._task: BackgroundTask | None = None
        self._has_warned = False

    def prepare(self) -> None:
        """Take the memory of a copy of the share in the background.

        The first copy then does not wait for the system to find that much memory, which can take
        ten times as long as copying. A share that has grown since takes it again.
        """
        needed = bytes_to_copy(_share_of(self._worker))
        if self._task is not None or not self._has_memory(needed):
            return

        def take(stop: threading.Event) -> None:
            self._memory.clear(needed)
            self._memory.touch(stop)

        self._task = BackgroundTask(take, f"memory for the run state of rank {self._rank}")

    def begin(self, folder: str, in_background: bool) -> None:
        """Write the share as it is now to ``folder``, which all workers have.

        In the background that takes a copy of it; where the host has no memory for one, and
        without ``in_background``, the share is on the disk when this returns. Raises what the share
        before it failed with.
        """
        if (failure := self.failure(wait=True)) is not None:
            raise StorageError(failure)
        target, rank = Path(folder), self._rank
        tree = map_tensors(_share_of(self._worker), lambda tensor: tensor, "worker")
        target.mkdir(exist_ok=True)
        is_copied = in_background and self._has_memory(needed := bytes_to_copy(tree))
        if is_copied:
            self._memory.clear(needed)
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
        """Error of writing the last share, in words; None: none so far.

        ``wait``: until it is written.
        """
        task = self._task
        if task is None or not (task.wait() if wait else task.done):
            return None
        self._task = None
        if task.error is None or isinstance(task.error, StorageError):
            return None if task.error is None else str(task.error)
        return f"{type(task.error).__name__}: {task.error}"

    @property
    def _rank(self) -> int:
        return self._worker.parallel.rank

    def _has_memory(self, needed: int) -> bool:
        """Room for a copy; a lack of it is logged once."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self._worker.parallel.world_size))
        free = available_bytes() // max(1, here)
        if needed <= free + self._memory.size:
            return True
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a copy of the run state takes %s of host memory for this process and %s are "
                "free: it is written in place, and training waits for the disk",
                *map(readable_bytes, (needed, free)),
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
    """Write a worker's file and, once the file is on the disk, its mark.

    The rename of the mark is the last access to ``target``: `seal` may return, and the folder get
    another name, at once.
    """
    share = target / _name(rank)
    checksum = write_tree(share, tree, stop)
    mark = json.dumps({"checksum": checksum, "size": share.stat().st_size}).encode()
    unsealed = target / f".{_mark(rank)}.partial"
    with durable_file(unsealed, len(mark)) as file:
        file.write(mark)
    os.replace(unsealed, target / _mark(rank))


def seal(folder: Path, num_shares: int, stop: threading.Event | None = None) -> None:
    """Wait until all workers have written their shares; put the checksums of all in one file.

    Raises:
        AbandonedError: ``stop`` was set before.
        DamagedStateError: a share does not have the size that its worker wrote.
    """
    checksums = {}
    for rank in range(num_shares):
        share, marked = folder / _name(rank), folder / _mark(rank)
        while not marked.exists():
            if stop is None:
                time.sleep(_LOOK_S)
            elif stop.wait(_LOOK_S):
                raise AbandonedError(f"{marked} was not written")
        mark = json.loads(marked.read_bytes())
        if share.stat().st_size != mark["size"]:
            raise DamagedStateError(
                f"{share} has {share.stat().st_size} bytes, and {mark['size']} were written; is "
                "this directory the same on all machines?"
            )
        checksums[share.name] = mark["checksum"]
    write_checksums(folder, checksums)
    for rank in range(num_shares):
        (folder / _mark(rank)).unlink()


def save_worker_state(worker: StatefulWorker, folder: str, prefix: str = "") -> None:
    """Write this worker's share and its random states to ``folder``, which all workers share.

    Collective over the role's workers; an error on one is raised on all. ``prefix``: see
    `raised_on_all`.
    """
    with raised_on_all(gather_objects, prefix):
        ShareWriter(worker).begin(folder, in_background=False)
    if worker.parallel.rank == 0:
        seal(Path(folder), worker.parallel.world_size)


def load_worker_state(worker: StatefulWorker, folder: str) -> None:
    """Inverse of `save_worker_state`, whatever layout the saved run had.

    Random states belong to a process: on another layout the generators stay as the seed left them.
    Collective over the role's workers; ``DamagedStateError`` on all of them where a file is not
    what was written, and then nothing was restored.
    """
    parallel = worker.parallel
    check_worker_states(parallel, Path(folder))
    shares = SavedShares(Path(folder), parallel.rank)
    worker.load_state_dict(shares)
    if shares.layout == parallel.layout_in_words:
        restore_rng(shares.share(parallel.rank)["rng"], accelerator.set_rng_state)


def check_worker_states(parallel: ParallelState, folder: Path) -> None:
    """Refuse ``folder`` if a file is not what was written; every worker reads its share.

    A folder of a version that wrote no checksums is not looked at.
    """
    with raised_on_all(gather_objects):
        written = sorted(read_checksums(folder).items())
        check_files(folder, dict(written[parallel.rank :: parallel.world_size]))


def save_optimizer_state(worker: StatefulWorker, folder: str) -> None:
    """Write ``folder``, complete or not at all; every worker calls it, and all share the disk.

    It holds what a role's folder of a run state holds, and any parallel layout reads it.
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
    """Restore weights, moments and step from what `save_optimizer_state` wrote."""
    if not Path(folder).is_dir():
        raise CheckpointNotFoundError(
            f"optimizer_path={folder} does not exist; give a directory that save_checkpoint wrote, "
            "or none to begin with fresh optimizer state"
        )
    check_worker_states(worker.parallel, Path(folder))
    worker.load_state_dict(SavedShares(Path(folder), worker.parallel.rank))


def save_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Write the tokenizer's files into ``folder``; rank 0 does, and if it cannot, all raise."""

    def write() -> None:
        for name, content in tokenizer.files().items():
            with atomic_file(Path(folder) / name, len(content)) as file:
                file.write(content)

    on_rank_zero(write)


class SavedShares(Sequence[Mapping[str, Any]]):
    """Return values of `StatefulWorker.state_dict` on every worker that was saved, in rank order.

    Memory-mapped, and opened when indexed: files that are not indexed are not read.

    Args:
        folder: that the shares were written to.
        rank: the rank whose file is read first; any other's describes the saved run as well.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._shares: dict[int, Mapping[str, Any]] = {}
        known = rank if (folder / _name(rank)).exists() else 0
        if not (folder / _name(known)).exists():
            raise CheckpointError(
                f"the run state lacks {folder / _name(0)}; resume from an earlier state or set "
                "another exp_manager.explicit_log_dir"
            )
        self._size = int(self.share(known)["world_size"])
        self.layout = str(self.share(known)["layout"])  # in words

    def share(self, rank: int) -> Mapping[str, Any]:
        """All that one worker wrote."""
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
