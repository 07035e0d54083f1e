"""What the workers of one role put into a run state: a folder of the role, one file per worker.

Every worker writes and reads its own file, so that nothing of the size of a model passes through
the process that runs the loop. Reading is memory-mapped: a worker touches of the others' files what
it needs for its own share.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aligner.checkpoint.durable import require_free_space
from aligner.checkpoint.rng import capture_rng, restore_rng
from aligner.checkpoint.state_tree import estimate_bytes, normalise, read_tree, write_tree
from aligner.distributed import accelerator
from aligner.distributed.parallel import ParallelState
from aligner.errors import CheckpointError


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
    """Write this worker's share and its random states to ``folder``, which all workers share."""
    target = Path(folder)
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
    write_tree(target / _name(parallel.rank), tree)


def load_worker_state(worker: StatefulWorker, folder: str) -> None:
    """Inverse of `save_worker_state`, whatever layout the saved run had.

    Random states belong to a process: on another layout the generators stay as the seed left them.
    """
    shares = read_worker_states(Path(folder))
    worker.load_state_dict([share["state"] for share in shares])
    parallel = worker.parallel
    if shares[0]["layout"] == parallel.layout_in_words:
        restore_rng(shares[parallel.rank]["rng"], accelerator.set_rng_state)


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
