"""The frozen reference policy: the weights that training began with."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel

from aligner.models.gpt.held_weights import HeldWeights
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
        self._policy = policy
        self._model: GPTModel | None = None
        self._initial: HeldWeights | None = None
        if mode == "keep":
            assert build is not None
            initial = dict(policy.named_parameters())
            self._model = build().eval().requires_grad_(False)
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(initial[name])
        elif mode == "swap":
            learning = {n: value for n, value in policy.named_parameters() if value.requires_grad}
            self._initial = HeldWeights(learning)

    @contextlib.contextmanager
    def model(self) -> Iterator[GPTModel]:
        """A model with the initial weights, for inference inside the block."""
        if self._model is not None:
            yield self._model
            return
        initially = (
            adapters_off(self._policy) if self._initial is None else self._initial.in_place()
        )
        with initially:
            yield self._policy
