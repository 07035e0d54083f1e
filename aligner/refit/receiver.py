"""`RefitReceiver`: the engine's side of a refit; it needs nothing of the policy's environment."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligner.device import accelerator
from aligner.errors import WorkerError
from aligner.refit.broadcast import WeightBroadcast
from aligner.refit.ends import RefitKeys
from aligner.refit.segments import accept


class RefitReceiver(ABC):
    """A worker of a sampling engine, which takes a policy's weights a group of tensors at a time.

    An engine loads tensors (`begin_refit`, `load_weights`, `finish_refit`); how they are received
    is implemented here once.
    """

    refit_keys: ClassVar[RefitKeys]
    _broadcast: WeightBroadcast | None = None

    @abstractmethod
    def begin_refit(self) -> None:
        """Stop sampling and expect weights."""

    @abstractmethod
    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Load whole tensors under Hugging Face's names; their memory is lent for the call."""

    @abstractmethod
    def finish_refit(self) -> None:
        """The weights are complete: sample with them from now on."""

    def sharing_key(self) -> str:
        """The machine or device on which this worker opens weights."""
        return accelerator.sharing_key()

    def load_weights_from_ipc(self, handles: dict[str, Any]) -> None:
        """Load the weights that a policy worker on this machine or device offers."""
        self.load_weights(accept(handles, self.refit_keys.refit))

    def init_collective(self, ip: str, port: int, world_size: int, timeout_s: float) -> None:
        """Join the group in which the policy broadcasts its weights."""
        self._broadcast = WeightBroadcast.join(ip, port, world_size, timeout_s)

    def receive_weights(
        self, infos: Sequence[tuple[str, tuple[tuple[int, ...], torch.dtype]]]
    ) -> None:
        """Load the weights that the policy sends now: names, each with shape and dtype."""
        if self._broadcast is None:
            raise WorkerError("init_collective must be called before weights are received")
        weights: list[tuple[str, Tensor]] = []
        for name, (shape, dtype) in infos:
            tensor = torch.empty(shape, dtype=dtype, device=accelerator.device())
            self._broadcast.send(tensor)
            weights.append((name, tensor))
        self.load_weights(weights)
