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

from aligner.checkpoint.run_state.tree import storage_bytes
from aligner.distributed import accelerator


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

    def to_host(self, *, params: bool, grads: bool) -> None:
        """Free the device memory of weights, which are copied, and of gradients, which are not.

        Nothing moves where there is no device apart from the host.
        """
        weights = [_plain(parameter.data) for parameter in self._model.parameters()]
        buffers = [
            parameter.main_grad
            for parameter in self._model.parameters()
            if hasattr(parameter, "main_grad")
        ]
        self.park(kept=weights if params else [], freed=buffers if grads else [])

    def park(self, *, kept: Iterable[Tensor], freed: Iterable[Tensor]) -> None:
        """Park tensors of any shape and dtype: ``kept`` are copied, ``freed`` return as zeros."""
        leaving: list[_Parked] = []
        for tensors, keep in ((kept, True), (freed, False)):
            for storage, device in _storages(tensors):
                content = storage_bytes(storage, device)
                sample = content if keep else content[:1]
                copy = accelerator.to_host(sample)
                if copy is not sample and content.numel():
                    size = content.numel()
                    leaving.append(_Parked(storage, device, size, copy if keep else None))
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


def _plain(tensor: Tensor) -> Tensor:
    """Local part of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, torch.device]]:
    """The storages behind tensors, each once, and where they are."""
    found = {
        tensor.untyped_storage()._cdata: (tensor.untyped_storage(), tensor.device)
        for tensor in tensors
    }
    return list(found.values())


class SwappedWeights:
    """Begins as a copy of the parameters' values.

    On a GPU an exchange costs two copies of the weights and no device memory.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: tensors of any shape and float dtype by their names."""
        self._parameters = dict(parameters)
        self._held = {
            name: accelerator.to_host(value.detach().clone())
            for name, value in self._parameters.items()
        }

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the values of the parameters with the held ones."""
        for name, parameter in self._parameters.items():
            current = accelerator.to_host(parameter.detach().clone())
            parameter.copy_(self._held[name])
            self._held[name] = current

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the parameters have the held values."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()
