"""Starting the processes of a run where nobody has started them."""

import os
from datetime import timedelta

from aligner.config import ProcessConfig
from aligner.distributed import accelerator


def start_processes(trainer: ProcessConfig, timeout_s: float) -> None:
    """Start ``trainer.devices`` processes on this node unless torchrun or Slurm has.

    Lightning Fabric runs this very command once more for every further process, with its rank in
    the environment, and connects them; each of them returns from here. One process needs nothing.
    ``timeout_s`` is the longest wait for another rank in a collective.
    """
    if trainer.world_size == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return
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
