"""Files that `save_checkpoint` writes beside a role's weights: optimizer state and tokenizer.

The optimizer's directory holds one file per worker, as the run state does: its share of the float32
weights, the moments and the step. Any parallel layout reads it back.
"""

import os
import shutil
from pathlib import Path

from aligner.checkpoint.durable import atomic_file, sync_path, sync_tree
from aligner.checkpoint.run_state.files import discard
from aligner.checkpoint.run_state.worker_state import (
    SavedShares,
    StatefulWorker,
    check_worker_states,
    save_worker_state,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointNotFoundError, StorageError
from aligner.parallel.collectives import gather_objects, on_rank_zero


def save_optimizer_state(worker: StatefulWorker, folder: str) -> None:
    """Write ``folder``, complete or not at all; every worker calls it, and all share the disk."""
    target = Path(folder)
    partial = target.with_name(f".{target.name}.partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir(parents=True)

    on_rank_zero(begin)
    failure: Exception | None = None
    try:
        save_worker_state(worker, str(partial))
    except Exception as error:
        failure = error
    reports = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(reports) if text is not None]
    if failed:
        raise StorageError(f"optimizer_path={folder} was not written: {'; '.join(failed)}")
    on_rank_zero(lambda: _replace(target, partial))


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


def _replace(target: Path, partial: Path) -> None:
    """Give ``partial`` the name ``target``; an earlier directory is kept until then."""
    sync_tree(partial)
    old = target.with_name(f".{target.name}.old")
    discard(old)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    sync_path(target.parent)
    discard(old)
