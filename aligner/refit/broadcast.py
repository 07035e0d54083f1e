"""A process group between the policy's first worker and engines that may be anywhere.

It is apart from torch.distributed's world: engines are not ranks of the run. Rank 0 is the policy
worker and keeps the rendezvous; engines are 1, 2, ...

Consumes: tensors of rank 0. Waits for: every member, at the start and in every broadcast;
``timeout_s`` ends each wait.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError


def open_rendezvous(ip: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Open the rendezvous; port 0: a free one, which ``store.port`` holds. Nobody is waited for."""
    return dist.TCPStore(
        ip,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def own_address() -> str:
    """An address of this machine that other nodes of the run reach."""
    # Rank 0 is the master of the run's own rendezvous; its address is known to work.
    return os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())


class WeightBroadcast:
    """One member of the group."""

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> None:
        """Join as ``rank``; returns when all members have."""
        self._store = store  # of rank 0: the rendezvous itself, which must live on
        self.rank = rank
        limit = timedelta(seconds=timeout_s)
        try:
            self._group = _process_group(
                dist.PrefixStore("weights", store), rank, world_size, limit
            )
            # A member that is missing is noticed here, not in the first broadcast of weights.
            self._send(torch.zeros(1, device=accelerator.device()))
        except RuntimeError as error:
            raise WorkerError(
                f"rank {rank} of {world_size} did not meet the others of the weight broadcast "
                f"within {timeout_s:g} s: {error}"
            ) from error

    @classmethod
    def join(cls, ip: str, port: int, world_size: int, timeout_s: float) -> "WeightBroadcast":
        """Join from elsewhere; who comes first is rank 1."""
        try:
            store = dist.TCPStore(ip, port, world_size, False, timedelta(seconds=timeout_s))
            rank = int(store.add("members", 1))
        except RuntimeError as error:
            raise WorkerError(
                f"the policy cannot be reached at {ip}:{port} within {timeout_s:g} s to receive "
                f"weights from it: {error}; is that address reachable from here?"
            ) from error
        return cls(store, rank, world_size, timeout_s)

    def send(self, tensor: Tensor) -> None:
        """Copy rank 0's ``tensor``, of any shape and dtype, into everybody's, which has the same.

        Raises:
            WorkerError: the connection failed, or a rank is gone.
        """
        try:
            self._send(tensor)
        except RuntimeError as error:
            raise WorkerError(f"weights did not reach or leave rank {self.rank}: {error}") from None

    def _send(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


def _process_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.Backend:
    if accelerator.backend() == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)
