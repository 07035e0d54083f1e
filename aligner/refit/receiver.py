"""`RefitReceiver`: an engine's part of a refit, independent of the policy's environment."""

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
    """Base of an engine's workers. It receives groups of weights, which the engine loads."""

    section: ClassVar[str]  # of the engine, with the key ``refit``, for messages
    _broadcast: WeightBroadcast | None = None

    @abstractmethod
    def begin_refit(self) -> None:
        """Stop sampling and prepare for new weights."""

    @abstractmethod
    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Load complete tensors [...] by Hugging Face's names, valid during the call only."""

    @abstractmethod
    def finish_refit(self) -> None:
        """Use the new weights from now on."""

    def sharing_key(self) -> str:
        """Return the key of the machine or device on which this worker opens weights."""
        return accelerator.sharing_key()

    def load_weights_from_ipc(self, handles: dict[str, Any]) -> None:
        """Load weights that a policy worker on this machine or device offers."""
        self.load_weights(accept(handles, f"{self.section}.refit"))

    def init_collective(self, ip: str, port: int, world_size: int, timeout_s: float) -> None:
        """Join the group in which the policy broadcasts its weights."""
        self._broadcast = WeightBroadcast.join(ip, port, world_size, timeout_s)

    def receive_weights(
        self, infos: Sequence[tuple[str, tuple[tuple[int, ...], torch.dtype]]]
    ) -> None:
        """Receive and load weights. ``infos``: names, shapes and dtypes of the weights."""
        if self._broadcast is None:
            raise WorkerError("init_collective must be called before weights are received")
        weights: list[tuple[str, Tensor]] = []
        for name, (shape, dtype) in infos:
            tensor = torch.empty(shape, dtype=dtype, device=accelerator.device())
            self._broadcast.send(tensor)
            weights.append((name, tensor))
        self.load_weights(weights)
