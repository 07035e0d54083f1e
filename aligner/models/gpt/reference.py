"""The frozen reference policy: the weights that training began with."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from aligner.distributed import accelerator
from aligner.models.gpt.lora import adapters_off


class ReferencePolicy:
    """Holds the initial weights and lends a model that has them.

    ``keep``: a second model on the device, ready at once. ``swap``: a copy of the weights in host
    memory, exchanged with the policy's while the reference speaks; on a GPU this costs two copies
    of the weights per use and no device memory. Of a policy with adapters these are all there is to
    exchange. ``bare``: the policy without its adapters, which began as nothing.
    """

    def __init__(
        self,
        policy: GPTModel,
        mode: Literal["keep", "swap", "bare"],
        build: Callable[[], GPTModel] | None = None,
    ) -> None:
        """``build``: makes a second model; for ``keep``."""
        self.mode = mode
        self._policy = policy
        self._model: GPTModel | None = None
        self._weights: dict[str, Tensor] = {}
        if mode == "keep":
            assert build is not None
            initial = dict(policy.named_parameters())
            self._model = build().eval().requires_grad_(False)
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(initial[name])
        elif mode == "swap":
            self._weights = {
                name: accelerator.to_host(value.detach().clone())
                for name, value in _learning(policy)
            }

    @contextlib.contextmanager
    def model(self) -> Iterator[GPTModel]:
        """A model with the initial weights, for inference inside the block."""
        if self._model is not None:
            yield self._model
            return
        if self.mode == "bare":
            with adapters_off(self._policy):
                yield self._policy
            return
        self._exchange()
        try:
            yield self._policy
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in _learning(self._policy):
            current = accelerator.to_host(parameter.detach().clone())
            parameter.copy_(self._weights[name])
            self._weights[name] = current


def _learning(policy: GPTModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that change."""
    return ((name, value) for name, value in policy.named_parameters() if value.requires_grad)
