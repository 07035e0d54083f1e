"""Start of a run's processes where no launcher has started them."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

from aligner.config import ProcessConfig
from aligner.device import accelerator

_STARTER = "ALIGNER_STARTER_PID"  # of the environment: whose child a further process is
_INTERVAL_S = 0.5  # between looks at it


@contextlib.contextmanager
def started_processes(trainer: ProcessConfig, timeout_s: float) -> Iterator[None]:
    """Start ``trainer.devices`` processes on this node unless torchrun or Slurm has.

    Lightning Fabric runs this very command once more for every further process, with its rank in
    the environment, and connects them; each of them enters the block. One process needs nothing.

    A signal that ends the first process before the others have met it would leave them waiting for
    it. So within the block, and while they meet, a further process ends with status 1 once the
    first is gone. After the block `heartbeat.watched_ranks` does that.

    Args:
        trainer: how many processes, on how many nodes.
        timeout_s: the longest wait for another rank in a collective.
    """
    if trainer.world_size == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return
    over = threading.Event()
    starter = os.environ.pop(_STARTER, None)
    if starter is not None and "LOCAL_RANK" in os.environ:
        threading.Thread(
            target=_end_with, args=(int(starter), over), name="starter-watch", daemon=True
        ).start()
    else:
        os.environ[_STARTER] = str(os.getpid())  # for those that are started now
    try:
        _launch(trainer, timeout_s)
        os.environ.pop(_STARTER, None)
        yield
    finally:
        over.set()


def _launch(trainer: ProcessConfig, timeout_s: float) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(
        accelerator="gpu" if accelerator.has_gpu() else "cpu",
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=DDPStrategy(timeout=timedelta(seconds=timeout_s)),
    )
    fabric.launch()
    # Slurm and MPI number a node's processes in ways of their own, which Lightning knows; without
    # this each would take the first GPU.
    if fabric.local_rank:
        os.environ["LOCAL_RANK"] = str(fabric.local_rank)


def _end_with(starter: int, over: threading.Event) -> None:
    """End this process once ``starter`` is not its parent any more; until ``over``."""
    while os.getppid() == starter:
        if over.wait(_INTERVAL_S):
            return
    print(
        f"pid {os.getpid()} stops: the process that started it (pid {starter}) is gone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # the main thread may wait for the first process, which no exception can reach
