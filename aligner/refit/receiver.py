"""Base class of engine workers that receive a policy's weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError
from aligner.refit.broadcast import WeightBroadcast
from aligner.refit.segments import accept


class RefitReceiver(ABC):
    """Base class of engine workers, in the engine's Python environment, that receive weights."""

    section: ClassVar[str]  # configuration section of the engine, for messages
    _broadcast: WeightBroadcast | None = None

    @abstractmethod
    def begin_refit(self) -> None:
        """Stop sampling, and prepare to load new weights."""

    @abstractmethod
    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Load pairs of Hugging Face name and full tensor [...]. Tensors are freed afterwards."""

    @abstractmethod
    def finish_refit(self) -> None:
        """Complete the reload. Sampling uses the new weights from now on."""

    def sharing_key(self) -> str:
        """Return a text that is equal for processes that can share memory with this worker."""
        return accelerator.sharing_key()

    def load_weights_from_ipc(self, handles: dict[str, Any]) -> None:
        """Load weights. ``handles``: result of `RefitSource.get_weights_ipc_handles`."""
        self.load_weights(accept(handles, f"{self.section}.refit"))

    def init_collective(self, ip: str, port: int, world_size: int, timeout_s: float) -> None:
        """Join the policy's broadcast group, whose rendezvous is at ``ip:port``."""
        self._broadcast = WeightBroadcast.join(ip, port, world_size, timeout_s)

    def receive_weights(
        self, infos: Sequence[tuple[str, tuple[tuple[int, ...], torch.dtype]]]
    ) -> None:
        """Receive broadcast weights and load them. ``infos``: name, (shape, dtype) of each."""
        if self._broadcast is None:
            raise WorkerError("init_collective must be called before weights are received")
        weights: list[tuple[str, Tensor]] = []
        for name, (shape, dtype) in infos:
            tensor = torch.empty(shape, dtype=dtype, device=accelerator.device())
            self._broadcast.send(tensor)
            weights.append((name, tensor))
        self.load_weights(weights)
