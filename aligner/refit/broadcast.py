"""A process group of the policy's first worker and the engines, for broadcasting weights.

The group is independent of torch.distributed's world, because engines are not ranks of the run.
Rank 0 is the policy worker and owns the rendezvous. Engines are ranks 1, 2, ...

Consumes: tensors of rank 0. Waits for: every member, at the start and in every broadcast, each time
at most ``timeout_s``.
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
    """Open the rendezvous without waiting. Port 0 chooses a free port, see ``store.port``."""
    return dist.TCPStore(
        ip,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def own_address() -> str:
    """Return an address of this machine that other nodes of the run can reach."""
    # Rank 0 is the master of the run's rendezvous, so other nodes have reached this address.
    return os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())


class WeightBroadcast:
    """One member of the group."""

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> None:
        """Join as ``rank``, and wait for all members."""
        self._store = store  # on rank 0 the rendezvous itself, which must stay alive
        self.rank = rank
        timeout = timedelta(seconds=timeout_s)
        prefix_store = dist.PrefixStore("weights", store)
        try:
            if accelerator.backend() == "gloo":
                self._group = dist.ProcessGroupGloo(prefix_store, rank, world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefix_store, rank, world_size, options)
            # Detect missing members now instead of in the first broadcast of weights.
            self._send(torch.zeros(1, device=accelerator.device()))
        except RuntimeError as error:
            raise WorkerError(
                f"rank {rank} of {world_size} did not meet the others of the weight broadcast "
                f"within {timeout_s:g} s: {error}"
            ) from error

    @classmethod
    def join(cls, ip: str, port: int, world_size: int, timeout_s: float) -> "WeightBroadcast":
        """Join from another process. Ranks are assigned in the order of arrival, from 1."""
        try:
            store = dist.TCPStore(ip, port, world_size, False, timedelta(seconds=timeout_s))
            rank = int(store.add("members", 1))
        except RuntimeError as error:
            raise WorkerError(
                f"cannot reach the policy at {ip}:{port} within {timeout_s:g} s to receive its "
                f"weights: {error}. Check that this machine can reach the address"
            ) from error
        return cls(store, rank, world_size, timeout_s)

    def send(self, tensor: Tensor) -> None:
        """Broadcast rank 0's ``tensor``, of any shape and dtype, into all members' equal tensors.

        Raises:
            WorkerError: the connection failed, or a rank has died.
        """
        try:
            self._send(tensor)
        except RuntimeError as error:
            raise WorkerError(f"weights did not reach or leave rank {self.rank}: {error}") from None

    def _send(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
