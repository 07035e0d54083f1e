"""Files that `save_checkpoint` writes beside a role's weights: optimizer state and tokenizer.

The optimizer's directory holds one file per worker, as the run state does: its share of the float32
weights, the moments and the step. Any parallel layout reads it back.
"""

import shutil
from pathlib import Path

from aligner.checkpoint.durable import atomic_file
from aligner.checkpoint.run_state.files import replace_folder
from aligner.checkpoint.run_state.worker_state import (
    SavedShares,
    StatefulWorker,
    check_worker_states,
    save_worker_state,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointNotFoundError
from aligner.parallel.collectives import on_rank_zero


def save_optimizer_state(worker: StatefulWorker, folder: str) -> None:
    """Write ``folder``, complete or not at all; every worker calls it, and all share the disk."""
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
