"""The frozen reference policy: the weights that training began with."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.distributed import accelerator


class ReferencePolicy:
    """Holds the initial weights and lends a model that has them.

    ``keep``: a second model on the device, ready at once. ``swap``: a copy of the weights in host
    memory, exchanged with the policy's while the reference speaks; on a GPU this costs two copies
    of the weights per use and no device memory.
    """

    def __init__(
        self, policy: GPTModel, mode: Literal["keep", "swap"], build: Callable[[], GPTModel]
    ) -> None:
        self.mode = mode
        self._policy = policy
        initial = dict(policy.named_parameters())
        if mode == "keep":
            self._model: GPTModel | None = build().eval().requires_grad_(False)
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(initial[name])
            self._weights: dict[str, Tensor] = {}
        else:
            self._model = None
            self._weights = {
                name: accelerator.to_host(value.detach().clone()) for name, value in initial.items()
            }

    @contextlib.contextmanager
    def model(self) -> Iterator[GPTModel]:
        """A model with the initial weights, for inference inside the block."""
        if self._model is not None:
            yield self._model
            return
        self._exchange()
        try:
            yield self._policy
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._policy.named_parameters():
            current = accelerator.to_host(parameter.detach().clone())
            parameter.copy_(self._weights[name])
            self._weights[name] = current
