"""Placement of a model's weights and gradient buffers: on the device, or parked in host memory.

Storages are moved, not tensors. A parameter, the share of it that the distributed optimizer
updates and a tied copy are views of one storage, and stay so.

Parameters may have second values there, which are exchanged with the present ones.
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
    """Memory of the device that was freed."""

    storage: torch.UntypedStorage
    device: torch.device
    size: int  # bytes
    copy: Tensor | None  # its content, uint8; None: zeros


class ModelOffload:
    """Parks the storages of one model and brings them back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parked: list[_Parked] = []
        self._memory = CopyMemory()

    def to_host(self, *, params: bool, grads: bool) -> None:
        """Free the device memory of weights, which are copied, and of gradients, which are not.

        Nothing moves where there is no device apart from the host.
        """
        weights = [
            value.to_local() if isinstance(value, DTensor) else value
            for value in (parameter.data for parameter in self._model.parameters())
        ]
        buffers = [
            parameter.main_grad
            for parameter in self._model.parameters()
            if hasattr(parameter, "main_grad")
        ]
        self.park(kept=weights if params else [], freed=buffers if grads else [])

    def park(self, *, kept: Iterable[Tensor], freed: Iterable[Tensor]) -> None:
        """Park tensors of any shape and dtype: ``kept`` are copied, ``freed`` return as zeros."""
        storages = _storages(kept)
        copies = self._memory.copies([storage_bytes(*each) for each in storages])
        leaving = [
            _Parked(*each, copy.numel(), copy) for each, copy in zip(storages, copies, strict=True)
        ]
        leaving += [_Parked(*each, each[0].nbytes(), None) for each in _storages(freed)]
        accelerator.synchronize()  # copies are on their way
        for parked in leaving:
            parked.storage.resize_(0)
        self._parked += leaving
        accelerator.release_memory()

    def to_device(self) -> None:
        """Bring everything back; gradients are zero."""
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
    """The storages behind tensors on the device, each once, and where they are."""
    found = {
        tensor.untyped_storage()._cdata: (tensor.untyped_storage(), tensor.device)
        for tensor in tensors
        if accelerator.is_apart(tensor) and tensor.untyped_storage().nbytes()
    }
    return list(found.values())


class SwappedWeights:
    """Begins as a copy of the parameters' values.

    On a GPU an exchange costs two copies of the weights and no device memory.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: tensors of any shape and float dtype by their names."""
        self._parameters = list(parameters.values())
        self._held = CopyMemory().copies([value.detach() for value in self._parameters])
        accelerator.synchronize()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the values of the parameters with the held ones."""
        for parameter, held in zip(self._parameters, self._held, strict=True):
            current = parameter.clone()
            parameter.copy_(held, non_blocking=True)
            held.copy_(current, non_blocking=True)
        accelerator.synchronize()  # the host may read or free its memory

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the parameters have the held values."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()
