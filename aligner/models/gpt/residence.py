"""Where a model's weights and gradient buffers are: on the device, or parked in host memory.

Storages are moved, not tensors. A parameter, the share of it that the distributed optimizer
updates and a tied copy are views of one storage, and stay so.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.checkpoint.state_tree import storage_bytes
from aligner.distributed import accelerator


class Residence:
    """Parks the storages of one model and brings them back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parked: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

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
        leaving: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for tensors, keep in ((weights if params else [], True), (buffers if grads else [], False)):
            for storage in _storages(tensors):
                content = storage_bytes(storage)
                copy = accelerator.to_host(content)
                if copy is not content and content.numel():
                    leaving.append((storage, content.numel(), copy if keep else None))
        accelerator.synchronize()  # copies are on their way
        for storage, _, _ in leaving:
            storage.resize_(0)
        self._parked += leaving
        accelerator.release_memory()

    def to_device(self) -> None:
        """Bring everything back; gradients are zero."""
        for storage, size, copy in self._parked:
            storage.resize_(size)
            content = storage_bytes(storage)
            if copy is None:
                content.zero_()
            else:
                content.copy_(copy, non_blocking=True)
        accelerator.synchronize()  # the copies must not be freed before they are read
        self._parked = []


def _plain(tensor: Tensor) -> Tensor:
    """What this process holds of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return list(found.values())
