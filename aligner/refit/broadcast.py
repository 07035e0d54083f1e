"""Process group in which the policy's first worker broadcasts weights to the engines.

::

    policy worker (rank 0, opens the rendezvous) ─ tensor ─► engines (ranks 1, 2, ...)

The group is separate from torch.distributed's world, because engines are not ranks of the run. Its
start and every broadcast wait at most ``timeout_s`` seconds for all members.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError, raised_as


def open_rendezvous(ip: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Open a rendezvous without waiting for members. Port 0 selects a free port, ``store.port``."""
    return dist.TCPStore(
        ip,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


class WeightBroadcast:
    """One member of a group that broadcasts weights."""

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the group as ``rank``, and wait for all ``world_size`` members.

        Raises `WorkerError` if a member is missing after ``timeout_s`` seconds.
        """
        self._store = store  # on rank 0 the rendezvous, which must stay open
        self.rank = rank
        timeout = timedelta(seconds=timeout_s)
        prefix_store = dist.PrefixStore("weights", store)
        text = (
            f"rank {rank} of {world_size} could not connect to all members of the weight broadcast "
            f"within {timeout_s:g} s"
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
        """Join the group from an engine. Ranks are assigned from 1, in the order of arrival."""
        text = f"cannot connect to the policy at {ip}:{port} for its weights within {timeout_s:g} s"
        remedy = "check the network between this machine and the address"
        with raised_as(WorkerError, text, RuntimeError, remedy=remedy):
            store = dist.TCPStore(ip, port, world_size, False, timedelta(seconds=timeout_s))
            rank = int(store.add("members", 1))
        return cls(store, rank, world_size, timeout_s)

    def send(self, tensor: Tensor) -> None:
        """Broadcast rank 0's ``tensor`` [...] to the tensors of other ranks, which it overwrites.

        Raises `WorkerError` if the connection fails or a member has died.
        """
        text = f"the broadcast of weights failed on rank {self.rank}"
        with raised_as(WorkerError, text, RuntimeError):
            self._send(tensor)

    def _send(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
