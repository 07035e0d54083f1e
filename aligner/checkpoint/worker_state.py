"""What the workers of one role put into a run state: a folder of the role, one file per worker.

Every worker writes and reads its own file, so that nothing of the size of a model passes through
the process that runs the loop. Reading is memory-mapped: a worker touches of the others' files what
it needs for its own share. Checksums of all files stand beside them; before any is used, the
workers check them, each its share, and agree on the outcome.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aligner.checkpoint.checksums import damage, read_checksums, write_checksums
from aligner.checkpoint.durable import require_free_space
from aligner.checkpoint.rng import capture_rng, restore_rng
from aligner.checkpoint.state_tree import estimate_bytes, normalise, read_tree, write_tree
from aligner.distributed import accelerator
from aligner.distributed.agreement import gather_objects
from aligner.distributed.parallel import ParallelState
from aligner.errors import CheckpointError, DamagedStateError


class StatefulWorker(Protocol):
    """A worker whose share of a role can be saved."""

    parallel: ParallelState

    def state_dict(self) -> Mapping[str, Any]:
        """This process's share."""
        ...

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `state_dict`, from what every worker of the saved run gave, in rank order."""
        ...


def save_worker_state(worker: StatefulWorker, folder: str) -> None:
    """Write this worker's share and its random states to ``folder``, which all workers share.

    Collective over the role's workers. An error is raised where it happened; the others return, so
    whoever called them all must not take the folder for complete.
    """
    checksum, failure = None, None
    try:
        checksum = _write_share(worker, Path(folder))
    except Exception as error:
        failure = error
    checksums = gather_objects(checksum)
    if failure is not None:
        raise failure
    if worker.parallel.rank == 0 and None not in checksums:
        write_checksums(
            Path(folder),
            {_name(rank): each for rank, each in enumerate(checksums) if each is not None},
        )


def _write_share(worker: StatefulWorker, target: Path) -> int:
    """This worker's file; its checksum."""
    target.mkdir(exist_ok=True)
    parallel = worker.parallel
    tree = normalise(
        {
            "state": worker.state_dict(),
            "world_size": parallel.world_size,
            "layout": parallel.layout_in_words,
            "rng": capture_rng(accelerator.rng_state),
        },
        "worker",
    )
    require_free_space(target, estimate_bytes(tree))
    return write_tree(target / _name(parallel.rank), tree)


def load_worker_state(worker: StatefulWorker, folder: str) -> None:
    """Inverse of `save_worker_state`, whatever layout the saved run had.

    Random states belong to a process: on another layout the generators stay as the seed left them.
    Collective over the role's workers; ``DamagedStateError`` on all of them where a file is not
    what was written, and then nothing was restored.
    """
    check_worker_states(worker.parallel, Path(folder))
    shares = read_worker_states(Path(folder))
    worker.load_state_dict([share["state"] for share in shares])
    parallel = worker.parallel
    if shares[0]["layout"] == parallel.layout_in_words:
        restore_rng(shares[parallel.rank]["rng"], accelerator.set_rng_state)


def check_worker_states(parallel: ParallelState, folder: Path) -> None:
    """Refuse ``folder`` where a file is not what was written; every worker reads its share.

    A folder of a version that wrote no checksums is not looked at.
    """
    try:
        written = sorted(read_checksums(folder).items())
        found = damage(folder, dict(written[parallel.rank :: parallel.world_size]))
    except DamagedStateError as error:
        found = str(error)
    reports = [report for report in gather_objects(found) if report is not None]
    if reports:
        raise DamagedStateError("; ".join(dict.fromkeys(reports)))


def read_worker_states(folder: Path) -> list[Mapping[str, Any]]:
    """What `save_worker_state` wrote on every worker, in rank order, memory-mapped."""
    first = folder / _name(0)
    if not first.exists():
        raise CheckpointError(
            f"the run state lacks {first}; resume from an earlier state or set another "
            "exp_manager.explicit_log_dir"
        )
    share = read_tree(first)
    others = (read_tree(folder / _name(rank)) for rank in range(1, share["world_size"]))
    return [share, *others]


def _name(rank: int) -> str:
    return f"rank_{rank:05d}.pt"
