"""A model that `Generator` samples from, and the interface of its decoder."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

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


@dataclass
class SampledModel:
    """Model with the weights of a rollout."""

    model: nn.Module  # all of its parameters are on the device of the rollout
    decoder: Callable[[int, int], DecodingModel]  # for at most so many sequences of so many tokens
    # Ranks that compute the same tokens. The first rank's result counts.
    copies: dist.ProcessGroup | None = None
    is_pipelined: bool = False

    @classmethod
    def of_gpt(cls, gpt: GPTModel, architecture: GPTArchitecture) -> "SampledModel":
        """Return a megatron-core model, or this process's share, to sample from."""
        groups = gpt.pg_collection
        decoder = functools.partial(IncrementalModel, gpt, architecture)
        return cls(gpt, decoder, groups.cp, dist.get_world_size(groups.pp) > 1)


@contextlib.contextmanager
def synchronized_experts(model: nn.Module) -> Iterator[None]:
    """Allow ranks to run different numbers of forward passes inside the block.

    Ranks run an expert layer of megatron-core together, but finish generation at different times.
    Each pass is announced, and a rank that has finished runs only the expert layers, with one token
    of zeros, until all ranks have finished. All ranks of the expert-parallel group enter the block
    and use the group for nothing else inside. An error inside does not wait for the other ranks.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers or layers[0].ep_group.size() == 1:
        yield
        return
    group = layers[0].ep_group

    # Announce every pass of this rank to the finished ranks.
    def announce(*_: Any) -> None:
        _any_rank_works(True, group)

    hook = model.decoder.register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    # This rank has finished: join the passes of the others with one token of zeros.
    parameter = next(model.decoder.parameters())
    idle = parameter.new_zeros(1, 1, model.config.hidden_size)
    with torch.no_grad():
        while _any_rank_works(False, group):
            for experts in layers:
                experts(idle)


def _any_rank_works(this_rank: bool, group: dist.ProcessGroup) -> bool:
    working = torch.tensor([int(this_rank)], device=accelerator.device())
    dist.all_reduce(working, dist.ReduceOp.MAX, group=group)
    return bool(working.item())
