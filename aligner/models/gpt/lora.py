"""Low-rank adapters (Hu et al., 2021): ``y = W x + alpha / rank · B (A x)``.

How the two matrices are shared out over tensor-parallel ranks:

    column: A [rank, in] on all, B [out / tp, rank]    row: A [rank, in / tp], B [out, rank] on all

Between A and B there are ``rank`` numbers a token, and what ranks exchange is those. A matrix that
all ranks hold has the whole gradient on each; under sequence parallelism each has that of its
tokens, and the ``sequence_parallel`` mark has megatron-core add them up.

The names of the linear's own parameters stay, so that checkpoints fit with and without adapters.

Dropout of what adapters read is the same on every layout. Whether a number is dropped is decided by
a hash of the seed, the update, the adapter, the tokens up to this one, its position and the
feature. Neither the row that a sequence stands in, nor the micro-batch, nor the rank matters, and
sequences that begin alike drop alike there.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import (
    Adapters,
    adapter_shapes,
    add_product,
    check_same,
    read_adapters,
    save_adapters,
)
from aligner.checkpoint.canonical import LORA_A, LORA_B, REWARD_HEAD, Shape, check_shape, split
from aligner.checkpoint.gpt_weights import GatheredTensors, canonical_parameters
from aligner.config import LoraConfig
from aligner.errors import CheckpointError
from aligner.kernels.counter_hash import UNIFORM_BITS, combine, counter_hash, uniform_bits
from aligner.kernels.linear_product import ColumnLinear, RowLinear
from aligner.parallel.collectives import on_rank_zero
from aligner.parallel.groups import ParallelState


class TokenDropout:
    """Dropout state that the adapters of one model share: the tokens of the present pass."""

    def __init__(self, probability: float, seed: int) -> None:
        self.probability = probability
        self.update = 0  # number of the optimizer update that a pass belongs to
        self._seed = seed
        self._keys: Tensor | None = None

    @contextlib.contextmanager
    def of_pass(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        held: Tensor,
        positions: Tensor | None = None,
    ) -> Iterator[None]:
        """The block in which a forward pass drops out.

        Args:
            input_ids: int64 ``[b, S]``, right-padded.
            lengths: int64 ``[b]``.
            held: int64 ``[n, L]``, index into ``b * S`` of the token that stands there in the
                model, negative where none does.
            positions: int64 ``[b, S]``, from 0 in every sequence of a row; None: rows have one.
        """
        column = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        position = column if positions is None else positions
        tokens = counter_hash(self._seed, position, input_ids) * (column < lengths[:, None])
        # Of the tokens up to each one: sequences that begin alike drop alike there.
        prefixes = tokens.cumsum(dim=1) + self.update
        if positions is not None:  # less what stands before the sequence in its row
            first = column - position
            prefixes = prefixes - (prefixes - tokens).gather(1, first) + self.update
        keys = combine(prefixes, position).flatten()
        if keys.numel() == 0:  # a micro-batch without sequences still goes through the model
            keys = keys.new_zeros(1)
        self._keys = keys[held.clamp(min=0)].t()[:, :, None]
        try:
            yield
        finally:
            self._keys = None

    def __call__(self, hidden: Tensor, stream: int, *, part: int, parts: int, first: int) -> Tensor:
        """``hidden`` with some of it dropped and the rest scaled up.

        Args:
            hidden: float ``[L / parts, n, features]``.
            stream: of the adapter.
            part: which of the ``parts`` of a row these tokens are.
            parts: over how many ranks tokens are shared out.
            first: number of the first feature here, of those that all ranks hold together.
        """
        assert self._keys is not None, "adapters drop out in forward passes of micro-batches only"
        keys = self._keys.chunk(parts)[part]
        feature = torch.arange(first, first + hidden.shape[-1], device=hidden.device)
        drawn = uniform_bits(combine(keys, counter_hash(stream, feature)))
        kept = drawn >= int(self.probability * 2**UNIFORM_BITS)
        return hidden * kept.to(hidden.dtype) * (1.0 / (1.0 - self.probability))


class Adapter(nn.Module):
    """The two matrices of one linear, or this rank's share of them; they are 0 until filled."""

    def __init__(self, inputs: int, outputs: int, lora: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(lora.adapter_dim, inputs, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(outputs, lora.adapter_dim, dtype=dtype))
        self.scale = lora.scale
        self.enabled = True
        self.dropout: TokenDropout | None = None  # in training
        self.stream = 0  # of the dropout's draws

    def down(self, hidden: Tensor, *, part: int = 0, parts: int = 1, first: int = 0) -> Tensor:
        """``scale · A x`` ``[..., rank]``; see `TokenDropout` for what is shared out."""
        if self.training and self.dropout is not None:
            hidden = self.dropout(hidden, self.stream, part=part, parts=parts, first=first)
        return F.linear(hidden, self.a) * self.scale

    def up(self, low: Tensor) -> Tensor:
        """``B x`` of float ``[..., rank]``."""
        return F.linear(low, self.b)

    @torch.no_grad()
    def merged_into(self, weight: Tensor) -> Tensor:
        """Float ``weight`` [out, in] with the adapter added, for a plain linear."""
        return add_product(weight, self.a, self.b, self.scale)


class AdaptedLinear(nn.Module):
    """Mixin before a parallel linear: its output plus the adapter's."""

    lora: Adapter

    def forward(
        self, input_: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Float ``[s, b, in]`` to ``[s, b, out]``, of which ranks hold what the linear's have."""
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self.adapted(input_) if self.lora.enabled else output, bias

    def adapted(self, hidden: Tensor) -> Tensor:
        """The adapter's part of the output, shared out as in `forward`.

        ``hidden``: ``[s, b, in]``; returns ``[s, b, out]``.
        """
        raise NotImplementedError


class LoraColumnParallelLinear(AdaptedLinear, ColumnLinear):
    """A linear whose outputs are shared out, with an `Adapter`."""

    def __init__(self, *args: object, lora: LoraConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert not self.gather_output
        assert not self.explicit_expert_comm
        shape = self.input_size, self.output_size_per_partition
        self.lora = Adapter(*shape, lora, self.config.params_dtype)
        self.lora.a.sequence_parallel = self.sequence_parallel
        set_tensor_model_parallel_attributes(self.lora.b, True, 0, 1)

    def adapted(self, hidden: Tensor) -> Tensor:
        """Float ``[s, b, in]`` to ``[s, b, out / tp]``, s shared out under sequence parallelism."""
        group = self.tp_group
        if self.sequence_parallel:
            low = self.lora.down(hidden, part=group.rank(), parts=group.size())
            low = gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=group
            )
        else:
            low = copy_to_tensor_model_parallel_region(self.lora.down(hidden), group=group)
        return self.lora.up(low)


class LoraRowParallelLinear(AdaptedLinear, RowLinear):
    """A linear whose inputs are shared out, with an `Adapter`."""

    def __init__(self, *args: object, lora: LoraConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert self.input_is_parallel
        assert not self.explicit_expert_comm
        shape = self.input_size_per_partition, self.output_size
        self.lora = Adapter(*shape, lora, self.config.params_dtype)
        self.lora.b.sequence_parallel = self.sequence_parallel
        set_tensor_model_parallel_attributes(self.lora.a, True, 1, 1)

    def adapted(self, hidden: Tensor) -> Tensor:
        """Float ``[s, b, in / tp]`` to ``[s, b, out]``, s shared out under sequence parallelism."""
        group = self.tp_group
        low = self.lora.down(hidden, first=group.rank() * hidden.shape[-1])
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=group)
        return self.lora.up(low)


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
        trained = {
            name: parameter
            for name, parameter in canonical_parameters(self._gpt, self._architecture)
            if parameter.requires_grad
        }
        return GatheredTensors(
            trained,
            [*adapter_shapes(self._architecture, self.lora), *REWARD_HEAD],
            self._architecture,
            tp_group=self._parallel.tp_group,
            pp_group=self._parallel.pp_group,
        ).on_rank_zero()

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
