"""Interface of a model that `Generator` samples from, and its implementation for GPT models."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.device import accelerator
from aligner.models.gpt.decode.model import IncrementalModel


class DecodingModel(Protocol):
    """Interface of `IncrementalModel`, whose methods describe these."""

    @property
    def cache(self) -> Any:
        """Object with the attribute ``capacity`` and the methods ``fits`` and ``copy``."""

    @property
    def stages(self) -> Any:
        """Object with the method ``sampled_by_last`` of `PipelineComm`."""

    @property
    def can_be_captured(self) -> bool:
        """See `IncrementalModel.can_be_captured`."""

    @property
    def can_be_kept(self) -> bool:
        """See `IncrementalModel.can_be_kept`."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """See `IncrementalModel.session`."""

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """See `IncrementalModel.prefill`."""

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """See `IncrementalModel.decode`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `IncrementalModel.logits`."""


class SampledModel(Protocol):
    """Model with the weights of a rollout."""

    # Ranks that compute the same tokens. The first rank's result counts.
    copies: dist.ProcessGroup | None
    is_pipelined: bool

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over this process's parameters, all on the device of the rollout."""

    def decoder(self, num_slots: int, capacity: int) -> DecodingModel:
        """Return a decoder of at most ``num_slots`` sequences of at most ``capacity`` tokens."""

    def rollout(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a rollout. All ranks enter it, also those without prompts."""


class SampledGPT:
    """`SampledModel` of a megatron-core model."""

    def __init__(self, gpt: GPTModel, architecture: GPTArchitecture) -> None:
        self._gpt = gpt
        self._architecture = architecture
        self.copies: dist.ProcessGroup | None = gpt.pg_collection.cp
        self.is_pipelined = dist.get_world_size(gpt.pg_collection.pp) > 1

    def parameters(self) -> Iterator[Tensor]:
        """See `SampledModel.parameters`."""
        return self._gpt.parameters()

    def decoder(self, num_slots: int, capacity: int) -> IncrementalModel:
        """See `SampledModel.decoder`."""
        return IncrementalModel(
            self._gpt, self._architecture, num_slots=num_slots, capacity=capacity
        )

    def rollout(self) -> contextlib.AbstractContextManager[None]:
        """See `SampledModel.rollout`."""
        return synchronized_experts(self._gpt)


@contextlib.contextmanager
def synchronized_experts(gpt: GPTModel) -> Iterator[None]:
    """Allow ranks to run different numbers of forward passes inside the block.

    Ranks run an expert layer together, but finish generation at different times. Each pass is
    announced, and a rank that has finished runs only the expert layers, with one token of zeros,
    until all ranks have finished. All ranks of the expert-parallel group enter the block and use
    the group for nothing else inside. An error inside does not wait for the other ranks.
    """
    layers = [layer.mlp for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]
    if not layers or layers[0].ep_group.size() == 1:
        yield
        return
    group = layers[0].ep_group

    # Announce every pass of this rank to the finished ranks.
    def announce(*_: Any) -> None:
        _any_rank_works(True, group)

    hook = gpt.decoder.register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    # This rank has finished: join the passes of the others with one token of zeros.
    parameter = next(gpt.decoder.parameters())
    idle = parameter.new_zeros(1, 1, gpt.config.hidden_size)
    with torch.no_grad():
        while _any_rank_works(False, group):
            for experts in layers:
                experts(idle)


def _any_rank_works(this_rank: bool, group: dist.ProcessGroup) -> bool:
    working = torch.tensor([int(this_rank)], device=accelerator.device())
    dist.all_reduce(working, dist.ReduceOp.MAX, group=group)
    return bool(working.item())
