"""Start of a run's processes without a launcher such as torchrun.

first process ── Fabric runs the command again ──► other processes
thread of each other process ── first process ends before the block ──► end of the process
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

from aligner.config import ProcessConfig
from aligner.device import accelerator

_STARTER = "ALIGNER_STARTER_PID"  # environment variable: pid of the process that starts the others
_INTERVAL_S = 0.5  # between checks whether the first process still runs


@contextlib.contextmanager
def started_processes(trainer: ProcessConfig, timeout_s: float) -> Iterator[None]:
    """Context manager: start ``trainer.devices`` processes, unless torchrun or Slurm has done so.

    Lightning Fabric runs the current command again for each further process of this node, with its
    rank in the environment. Every process runs the block. A process that is still starting ends if
    the first process ends. ``timeout_s``: time limit of collectives in seconds.
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
        os.environ[_STARTER] = str(os.getpid())  # for the processes that are started now
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
    # Slurm and MPI do not set this variable. Without it, every process would use the first GPU.
    if fabric.local_rank:
        os.environ["LOCAL_RANK"] = str(fabric.local_rank)


def _end_with(starter: int, over: threading.Event) -> None:
    """End this process if its parent ``starter`` ends before the event ``over`` is set."""
    while os.getppid() == starter:
        if over.wait(_INTERVAL_S):
            return
    print(
        f"pid {os.getpid()} stops: the process that started it (pid {starter}) is gone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # no exception can reach a main thread that waits for the first process
