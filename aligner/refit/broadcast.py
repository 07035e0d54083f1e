"""A process group of the policy's first worker and the engines, for broadcasting weights.

::

    policy worker (rank 0, owns the rendezvous) ─ tensor ─► engines (ranks 1, 2, ...)

The group is independent of torch.distributed's world, because engines are not ranks of the run. The
start and every broadcast wait for all members, at most ``timeout_s``.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError, raised_as


def open_rendezvous(ip: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Open the rendezvous without waiting. Port 0 chooses a free port, see ``store.port``."""
    return dist.TCPStore(
        ip,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


class WeightBroadcast:
    """One member of the group."""

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> None:
        """Join as ``rank``, and wait for all members."""
        self._store = store  # on rank 0 the rendezvous itself, which must stay alive
        self.rank = rank
        timeout = timedelta(seconds=timeout_s)
        prefix_store = dist.PrefixStore("weights", store)
        text = (
            f"rank {rank} of {world_size} did not meet the others of the weight broadcast within "
            f"{timeout_s:g} s"
        )
        with raised_as(WorkerError, text, RuntimeError):
            if accelerator.backend() == "gloo":
                self._group = dist.ProcessGroupGloo(prefix_store, rank, world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefix_store, rank, world_size, options)
            # Detect missing members now instead of in the first broadcast of weights.
            self._send(torch.zeros(1, device=accelerator.device()))

    @classmethod
    def join(cls, ip: str, port: int, world_size: int, timeout_s: float) -> "WeightBroadcast":
        """Join from another process. Ranks are assigned in the order of arrival, from 1."""
        text = f"cannot reach the policy at {ip}:{port} within {timeout_s:g} s for its weights"
        remedy = "check that this machine can reach the address"
        with raised_as(WorkerError, text, RuntimeError, remedy=remedy):
            store = dist.TCPStore(ip, port, world_size, False, timedelta(seconds=timeout_s))
            rank = int(store.add("members", 1))
        return cls(store, rank, world_size, timeout_s)

    def send(self, tensor: Tensor) -> None:
        """Broadcast rank 0's ``tensor``, of any shape and dtype, into all members' equal tensors.

        Raises `WorkerError` if the connection failed, or a rank has died.
        """
        text = f"weights did not reach or leave rank {self.rank}"
        with raised_as(WorkerError, text, RuntimeError):
            self._send(tensor)

    def _send(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
