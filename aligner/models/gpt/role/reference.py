"""The frozen reference policy: the weights that training began with."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningModule
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.lora.adapters import adapters_off
from aligner.models.gpt.role.swapped_weights import SwappedWeights
from aligner.models.interfaces import Inferrable

# (batch, micro-batches, model with the initial weights) -> log-probs, as the policy scores.
Score = Callable[[Mapping[str, Tensor], MicroBatches | None, Any], Tensor]


class ReferenceModel(LightningModule, Inferrable):
    """Scores tokens as a policy did before it learned; it never learns itself.

    How the initial weights are held is the backend's. The module has parameters of its own where
    they are a second model; nothing of the policy is registered in it.
    """

    def __init__(self, score: Score) -> None:
        """``score``: the policy's way to make log-probs of a model."""
        super().__init__()
        self._score = score
        self.eval()

    @abstractmethod
    def initial_model(self) -> contextlib.AbstractContextManager[nn.Module]:
        """A model with the initial weights, for inference inside the block."""

    def infer(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Log-probs float32 ``[B, S]`` under the initial weights.

        ``batch`` and ``micro_batches`` as in `SamplingPolicy.get_logprobs`.
        """
        with self.initial_model() as initial:
            return self._score(batch, micro_batches, initial)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """See `infer`."""
        return self.infer(batch)

    def prepare_for_inference(self) -> None:
        """Nothing to prepare: it is always in evaluation mode."""

    def finish_inference(self) -> None:
        """Nothing to leave."""

    def train(self, mode: bool = True) -> Self:
        """Ignored: the model stays in evaluation mode."""
        del mode
        return super().train(False)


class ReferencePolicy(ReferenceModel):
    """The initial weights of a megatron-core policy.

    ``keep``: a second model on the device, ready at once. ``swap``: a copy of the weights in host
    memory, exchanged with the policy's while the reference scores; on a GPU this costs two copies
    of the weights per use and no device memory. Of a policy with adapters these are all there is to
    exchange. ``bare``: the policy without its adapters, which began as nothing.
    """

    def __init__(
        self,
        policy: GPTModel,
        mode: Literal["keep", "swap", "bare"],
        score: Score,
        build: Callable[[], GPTModel] | None = None,
    ) -> None:
        """``build``: makes a second model; for ``keep``. ``score``: see `ReferenceModel`."""
        super().__init__(score)
        self._policy = (policy,)  # in a tuple: it stays the policy's own module
        self.gpt: GPTModel | None = None
        self._initial: SwappedWeights | None = None
        if mode == "keep":
            assert build is not None
            initial = dict(policy.named_parameters())
            self.gpt = build().eval().requires_grad_(False)
            with torch.no_grad():
                for name, parameter in self.gpt.named_parameters():
                    parameter.copy_(initial[name])
        elif mode == "swap":
            learning = {n: value for n, value in policy.named_parameters() if value.requires_grad}
            self._initial = SwappedWeights(learning)

    @contextlib.contextmanager
    def initial_model(self) -> Iterator[GPTModel]:
        """See `ReferenceModel`."""
        if self.gpt is not None:
            yield self.gpt
            return
        policy = self._policy[0]
        initially = adapters_off(policy) if self._initial is None else self._initial.in_place()
        with initially:
            yield policy
