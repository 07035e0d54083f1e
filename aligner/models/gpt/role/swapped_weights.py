"""Second values of some parameters, held in host memory and exchanged with the present ones."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from aligner.distributed import accelerator


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
