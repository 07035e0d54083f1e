"""Offload of a model's weights and gradient buffers from the device to host memory.

Storages are moved, not tensors, because a parameter, its shard in the distributed optimizer and a
tied copy are views of one storage. They remain views of it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.checkpoint.background import CopyMemory
from aligner.checkpoint.run_state.tree import storage_bytes
from aligner.device import accelerator


class _Parked(NamedTuple):
    """Freed device memory of a storage."""

    storage: torch.UntypedStorage
    device: torch.device
    size: int  # bytes
    copy: Tensor | None  # content, uint8, or None to restore zeros


class ModelOffload:
    """Offload of the storages of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parked: list[_Parked] = []
        self._memory = CopyMemory()

    def to_host(self, *, params: bool, grads: bool) -> None:
        """Free the device memory of weights, after copying, and of gradients, without copying."""
        weights = [
            value.to_local() if isinstance(value, DTensor) else value
            for value in (parameter.data for parameter in self._model.parameters())
        ]
        buffers = [
            parameter.main_grad
            for parameter in self._model.parameters()
            if hasattr(parameter, "main_grad")
        ]
        self.park(copied=weights if params else [], freed=buffers if grads else [])

    def park(self, *, copied: Iterable[Tensor], freed: Iterable[Tensor]) -> None:
        """Free memory of tensors [...]. `to_device` restores ``copied`` and zeros ``freed``."""
        # Copy before any storage is freed, because tensors can share a storage.
        storages = _storages(copied)
        copies = self._memory.copies([storage_bytes(*storage) for storage in storages])
        parked = [
            _Parked(*storage, copy.numel(), copy)
            for storage, copy in zip(storages, copies, strict=True)
        ]
        parked += [_Parked(*storage, storage[0].nbytes(), None) for storage in _storages(freed)]
        accelerator.synchronize()  # the copies are asynchronous
        for storage, *_ in parked:
            storage.resize_(0)
        self._parked += parked
        accelerator.release_memory()

    def to_device(self) -> None:
        """Restore all parked memory, with gradients of zero."""
        for storage, device, size, copy in self._parked:
            storage.resize_(size)
            content = storage_bytes(storage, device)
            if copy is None:
                content.zero_()
            else:
                content.copy_(copy, non_blocking=True)
        if self._parked:
            accelerator.synchronize()  # the copies must not be freed before they are read
        self._parked = []


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, torch.device]]:
    """Return the distinct storages of tensors on the device, with their device."""
    storages = {
        tensor.untyped_storage()._cdata: (tensor.untyped_storage(), tensor.device)
        for tensor in tensors
        if accelerator.is_apart(tensor) and tensor.untyped_storage().nbytes()
    }
    return list(storages.values())


class SwappedWeights:
    """Second values of parameters in host memory, initially copies of the present values.

    On a GPU an exchange costs two copies of the weights and no device memory.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy ``parameters``, tensors of any shape and float dtype by their names."""
        self._parameters = list(parameters.values())
        self._copies = CopyMemory().copies([value.detach() for value in self._parameters])
        accelerator.synchronize()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the values of the parameters with the copies."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            current = parameter.clone()
            parameter.copy_(copy, non_blocking=True)
            copy.copy_(current, non_blocking=True)
        accelerator.synchronize()  # the host may read or free its memory

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the values for the duration of a block."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()
