"""The adapters of one role: where they begin, how they are switched off, saved and loaded."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import (
    Adapters,
    adapter_shapes,
    check_same,
    read_adapters,
    save_adapters,
)
from aligner.checkpoint.canonical import LORA_A, LORA_B, REWARD_HEAD, Shape, check_shape, split
from aligner.checkpoint.gpt_weights import canonical_parameters, gather_tensors
from aligner.config import LoraConfig
from aligner.distributed.object_collectives import on_rank_zero
from aligner.distributed.parallel import ParallelState
from aligner.errors import CheckpointError
from aligner.models.gpt.lora.dropout import TokenDropout
from aligner.models.gpt.lora.linear import Adapter


class RoleAdapters:
    """Adapters of a model that was built with them; all else but a head is frozen.

    Args:
        gpt: this process's share of the model.
        architecture: its shape.
        parallel: this process's place.
        lora: form of the adapters.
        seed: of A, and of dropout.
        has_head: whether the role trains a head beside its adapters.
    """

    def __init__(
        self,
        gpt: GPTModel,
        architecture: GPTArchitecture,
        parallel: ParallelState,
        lora: LoraConfig,
        *,
        seed: int,
        has_head: bool,
    ) -> None:
        self._gpt, self._architecture, self._parallel = gpt, architecture, parallel
        self._has_head = has_head
        self.lora = lora
        self.are_fresh = True  # B is zero, so the model is what it is without them
        self.dropout = TokenDropout(lora.adapter_dropout, seed) if lora.adapter_dropout else None
        gpt.adapter_dropout = self.dropout
        for name, parameter in canonical_parameters(gpt, architecture):
            parameter.requires_grad_(name.endswith((LORA_A, LORA_B)) or name in REWARD_HEAD)
        for name, adapter in _adapters(gpt, architecture).items():
            adapter.dropout, adapter.stream = self.dropout, _seed_of(seed, f"{name}.dropout")
        shapes = adapter_shapes(architecture, lora)
        self._fill(lambda name: _fresh(name, shapes[name], seed) if name in shapes else None)
        if gpt.pre_process and gpt.config.recompute_granularity == "full":
            gpt.embedding.register_forward_hook(_ask_gradient)

    def begin_update(self, number: int) -> None:
        """Passes from now on belong to another update, and drop out other numbers."""
        if self.dropout is not None:
            self.dropout.update = number

    def load(self, path: str | Path) -> None:
        """Take the adapters, and the head where there is one, from a file."""
        found = read_adapters(path, self._architecture)
        check_same(self.lora, found.lora, path)
        if REWARD_HEAD[0] in found.tensors and not self._has_head:
            raise CheckpointError(
                f"{str(path)!r} was trained with a head (rm_head), which a policy does not have; "
                "give adapters of a policy"
            )
        self._fill(found.tensors.get)
        self.are_fresh = False

    def save(self, path: str | Path, nemo_keys: Mapping[str, Any]) -> None:
        """Write a file; call it on every rank. Rank 0 writes, and if it cannot, all raise."""
        tensors = self.whole()
        on_rank_zero(lambda: save_adapters(path, Adapters(self.lora, tensors, nemo_keys)))

    def whole(self) -> dict[str, Tensor]:
        """Trained weights, joined on rank 0, none elsewhere; call it on every rank."""
        trained = (
            (name, parameter.detach())
            for name, parameter in canonical_parameters(self._gpt, self._architecture)
            if parameter.requires_grad
        )
        return gather_tensors(
            trained,
            [*adapter_shapes(self._architecture, self.lora), *REWARD_HEAD],
            self._architecture,
            tp_group=self._parallel.tp_group,
            pp_group=self._parallel.pp_group,
        )

    @torch.no_grad()
    def _fill(self, whole: Callable[[str], Tensor | None]) -> None:
        """Copy this process's share of the ``whole`` tensors; what has none stays."""
        tp_rank, tp_size = self._parallel.tp_rank, self._parallel.config.tensor
        for name, parameter in canonical_parameters(self._gpt, self._architecture):
            share = whole(name) if parameter.requires_grad else None
            if share is None:
                continue
            if name not in REWARD_HEAD:
                share = split(name, share, self._architecture, tp_rank, tp_size)
            check_shape(name, share.shape, tuple(parameter.shape))
            parameter.copy_(share)


@contextlib.contextmanager
def adapters_off(gpt: nn.Module) -> Iterator[None]:
    """Context in which the model computes with its frozen weights only."""
    adapters = [module for module in gpt.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def _adapters(gpt: GPTModel, architecture: GPTArchitecture) -> dict[str, Adapter]:
    """Adapters of this stage by the canonical name of their linear."""
    owners = {module.a: module for module in gpt.modules() if isinstance(module, Adapter)}
    return {
        name.removesuffix(LORA_A): owners[parameter]
        for name, parameter in canonical_parameters(gpt, architecture)
        if parameter in owners
    }


def _ask_gradient(_: nn.Module, __: Any, embedded: Tensor) -> None:
    """A recomputed layer has a gradient only where what it reads has one."""
    if torch.is_grad_enabled():
        embedded.requires_grad_()


def _fresh(name: str, shape: Shape, seed: int) -> Tensor:
    """A uniform in ±1/√in, drawn by its name, so on every layout the same; B zero."""
    tensor = torch.zeros(shape)
    if name.endswith(LORA_A):
        bound = 1.0 / math.sqrt(shape[1])
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        tensor.uniform_(-bound, bound, generator=generator)
    return tensor


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
