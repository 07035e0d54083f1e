"""Base class of policy workers that send weights to engines."""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError
from aligner.parallel.groups import ParallelState
from aligner.refit.broadcast import WeightBroadcast, open_rendezvous
from aligner.refit.ends import RefitEnd
from aligner.refit.segments import Offer, aligned_bytes

RefitInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name → shape, dtype


class RefitWorker(ABC):
    """Base class of policy workers. It sends weights with Hugging Face names, in groups.

    All methods must be called on all ranks, because gathering weights is a collective operation.
    """

    parallel: ParallelState
    _info: RefitInfo | None = None
    _offer: Offer | None = None
    _broadcast: WeightBroadcast | None = None
    _stores: Mapping[int, Any] = MappingProxyType({})  # port → rendezvous that this worker opened

    @abstractmethod
    def hf_weight_names(self) -> Sequence[str]:
        """Return the Hugging Face names of all weights, from first to last layer."""

    @abstractmethod
    def hf_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and gathered tensor of each weight in ``names``, on every worker.

        All workers must iterate over the same names. One tensor is in memory at a time.
        """

    def refit_end(self) -> RefitEnd:
        """Return this worker's location and library versions."""
        return RefitEnd.of_this_process(f"policy rank {self.parallel.rank}")

    def prepare_refit_info(self) -> RefitInfo:
        """Return shape and dtype of every weight. The first call gathers the weights."""
        if self._info is None:
            tensors = self.hf_weights(list(self.hf_weight_names()))
            self._info = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}
        return self._info

    # Shared memory or a shared device ---------------------------------------------------------

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], int]:
        """Return name and number of bytes of each weight, and the maximum bytes of an offer."""
        sizes = [(name, self._bytes_of(name)) for name in self.prepare_refit_info()]
        return sizes, accelerator.free_memory_bytes() // 2

    def get_weights_ipc_handles(
        self, keys: Sequence[str], readers: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Offer the weights ``keys`` to other processes until the next call.

        On CPU the first worker of a machine offers weights, on GPUs every worker whose sharing key
        (`accelerator.sharing_key`) is in ``readers``, the keys of all engines (None: any key). CUDA
        never frees exported memory that no process opens. Returns sharing key → handle, if any.
        """
        self._withdraw()
        tensors = self.hf_weights(keys)
        key = accelerator.sharing_key()
        can_offer = accelerator.has_gpu() or int(os.environ.get("LOCAL_RANK", "0")) == 0
        if not can_offer or (readers is not None and key not in readers):
            for _ in tensors:  # take part in the collective gathering
                pass
            return {}
        self._offer = Offer(tensors, sum(aligned_bytes(self._bytes_of(name)) for name in keys))
        return {key: self._offer.handle}

    # Broadcast --------------------------------------------------------------------------------

    def open_meeting_place(self, timeout_s: float) -> tuple[str, int] | None:
        """Open a rendezvous for the broadcast. Returns address and port on rank 0, else None."""
        if self.parallel.rank != 0:
            return None
        store = open_rendezvous("0.0.0.0", 0, 1, timeout_s)
        self._stores = {**self._stores, store.port: store}
        # Rank 0 is MASTER_ADDR, an address that other nodes can reach.
        address = os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())
        return address, store.port

    def init_collective(
        self, ip: str, port: int, world_size: int, timeout_s: float = 600.0
    ) -> None:
        """Let rank 0 join the broadcast group. Opens the rendezvous ``ip:port`` if necessary."""
        if self.parallel.rank != 0:
            return
        store = self._stores.get(port) or open_rendezvous(ip, port, world_size, timeout_s)
        self._broadcast = WeightBroadcast(store, 0, world_size, timeout_s)

    def broadcast_weights_for_collective(self, keys: Sequence[str] | None = None) -> None:
        """Broadcast the weights ``keys``, by default all, to the engines."""
        names = list(self.prepare_refit_info()) if keys is None else keys
        for _, tensor in self.hf_weights(names):
            if self.parallel.rank != 0:
                continue
            if self._broadcast is None:
                raise WorkerError("init_collective must be called before weights are broadcast")
            self._broadcast.send(tensor.contiguous())

    # Before and after a refit -----------------------------------------------------------------

    def offload_before_refit(self) -> None:
        """Free cached memory of the device for the engine."""
        accelerator.release_memory()

    def offload_after_refit(self) -> None:
        """Free the offered weights, which the engine has copied."""
        self._withdraw()
        accelerator.release_memory()

    def _withdraw(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None

    def _bytes_of(self, name: str) -> int:
        shape, dtype = self.prepare_refit_info()[name]
        return torch.Size(shape).numel() * dtype.itemsize
