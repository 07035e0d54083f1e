"""CUDA IPC on the dry device: memory of one process that another one opens.

What is exported is kept until somebody opens it, as on a GPU, where what nobody opens is kept for
ever. The device has number 0 in every process; what was exported names another one, for numbers are
each process's own.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

from aligner.dry.streams import Order, Process
from aligner.errors import DryDeviceError

_OTHER_NUMBER = 7  # the device's, where it was exported
_PARAMETERS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)


class Exports:
    """The device's memory that processes have exported."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._count = 0
        self._unopened: dict[int, tuple[Tensor, Process]] = {}

    def reduce(self, tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Stand-in for `torch.multiprocessing.reductions.reduce_tensor`, of any shape and dtype."""
        if not tensor.is_cuda:
            raise DryDeviceError(f"a tensor on {tensor.device} is no memory of the device")
        self._count += 1
        self._unopened[self._count] = tensor.detach(), self._order.process
        given = {"storage_device": _OTHER_NUMBER, "storage_handle": self._count}
        return self.open, tuple(given.get(name) for name in _PARAMETERS)

    def open(self, *arguments: Any) -> Tensor:
        """Stand-in for `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""
        given = dict(zip(_PARAMETERS, arguments, strict=True))
        if given["storage_device"] != 0:
            raise DryDeviceError(f"this process has no device {given['storage_device']}, only 0")
        tensor, exporter = self._unopened.pop(given["storage_handle"])
        # Its host has sent this one the place of the memory.
        self._order.process.host.wait_for(exporter.host.moment())
        return tensor
