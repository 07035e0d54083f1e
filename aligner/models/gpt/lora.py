"""Low-rank adapters (Hu et al., 2021): ``y = W x + alpha / rank · B (A x)``.

Tensor-parallel sharding of the two matrices:

    column: A [rank, in] replicated, B [out / tp, rank]
    row:    A [rank, in / tp], B [out, rank] replicated

Ranks exchange the ``rank`` values per token between A and B. Under sequence parallelism,
megatron-core sums the gradients of replicated matrices, which have the mark ``sequence_parallel``.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
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
from aligner.checkpoint.adapters import adapter_shapes, add_product
from aligner.checkpoint.canonical import LORA_A, LORA_B, REWARD_HEAD, Shape, check_shape, split
from aligner.checkpoint.gpt_weights import GatheredTensors, canonical_parameters
from aligner.config import LoraConfig
from aligner.device.counter_hash import UNIFORM_BITS, combine, counter_hash, uniform_bits
from aligner.kernels.linear_product import ColumnLinear, RowLinear
from aligner.parallel.groups import ParallelState


class TokenDropout:
    """Dropout of adapter inputs, the same for any order of rows, micro-batches and ranks.

    A mask bit is a hash of seed, update, adapter, feature and all tokens up to the position.
    """

    def __init__(self, probability: float, seed: int) -> None:
        self.probability = probability
        self.update = 0  # index of the optimizer update
        self._seed = seed
        self._keys: Tensor | None = None

    @contextlib.contextmanager
    def of_pass(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        frame_indices: Tensor,
        positions: Tensor | None = None,
    ) -> Iterator[None]:
        """Enable dropout in a forward pass inside the block.

        ``input_ids``: int64 ``[b, S]``, right-padded. ``lengths``: int64 ``[b]``.
        ``frame_indices``: int64 ``[n, L]``, index in ``b * S`` of each input token, or negative in
        padding. ``positions``: int64 ``[b, S]``, from 0 in each of several sequences of a row.
        """
        column = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        position = column if positions is None else positions
        tokens = counter_hash(self._seed, position, input_ids) * (column < lengths[:, None])
        # The hash of a token's prefix, including the token, without earlier sequences of the row.
        prefixes = tokens.cumsum(dim=1) + self.update
        if positions is not None:
            first = column - position
            prefixes = prefixes - (prefixes - tokens).gather(1, first) + self.update
        keys = combine(prefixes, position).flatten()
        if keys.numel() == 0:  # the model also runs a micro-batch without sequences
            keys = keys.new_zeros(1)
        self._keys = keys[frame_indices.clamp(min=0)].t()[:, :, None]
        try:
            yield
        finally:
            self._keys = None

    def __call__(self, hidden: Tensor, stream: int, *, part: int, parts: int, first: int) -> Tensor:
        """Apply dropout to float ``hidden`` ``[L / parts, n, features]``.

        ``stream``: hash seed of the adapter. ``part``: index of this rank's part of the L tokens,
        of which there are ``parts``. ``first``: index of this rank's first feature.
        """
        assert self._keys is not None, "adapter dropout needs the forward pass of a micro-batch"
        keys = self._keys.chunk(parts)[part]
        feature = torch.arange(first, first + hidden.shape[-1], device=hidden.device)
        bits = uniform_bits(combine(keys, counter_hash(stream, feature)))
        mask = bits >= int(self.probability * 2**UNIFORM_BITS)
        return hidden * mask.to(hidden.dtype) * (1.0 / (1.0 - self.probability))


class Adapter(nn.Module):
    """Matrices A and B of a linear layer or of experts, or this rank's shards of them."""

    def __init__(
        self, inputs: int, outputs: int, lora: LoraConfig, dtype: torch.dtype, *experts: int
    ) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(*experts, lora.adapter_dim, inputs, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(*experts, outputs, lora.adapter_dim, dtype=dtype))
        self.scale = lora.scale
        self.enabled = True
        self.dropout: TokenDropout | None = None  # in training
        self.stream = 0  # hash seed of the dropout

    def down(self, hidden: Tensor, *, part: int = 0, parts: int = 1, first: int = 0) -> Tensor:
        """Compute ``scale · A x`` ``[..., rank]``. For the keywords see `TokenDropout`."""
        if self.training and self.dropout is not None:
            hidden = self.dropout(hidden, self.stream, part=part, parts=parts, first=first)
        return F.linear(hidden, self.a) * self.scale

    def up(self, low: Tensor) -> Tensor:
        """Compute ``B x`` of float ``[..., rank]``."""
        return F.linear(low, self.b)

    @torch.no_grad()
    def merged_into(self, weight: Tensor) -> Tensor:
        """Return float ``weight`` [out, in] plus ``scale · B A``."""
        return add_product(weight, self.a, self.b, self.scale)


class AdaptedLinear(nn.Module):
    """Mixin of a parallel linear layer. It adds the adapter's output to the layer's output."""

    lora: Adapter

    def forward(
        self, input_: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output ``[s, b, out]`` for float ``[s, b, in]``, and its bias."""
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self._adapter_output(input_) if self.lora.enabled else output, bias

    def _adapter_output(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class LoraColumnParallelLinear(AdaptedLinear, ColumnLinear):
    """Linear layer with an `Adapter`. Tensor-parallel ranks split the outputs."""

    def __init__(self, *args: object, lora: LoraConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert not self.gather_output
        assert not self.explicit_expert_comm
        shape = self.input_size, self.output_size_per_partition
        self.lora = Adapter(*shape, lora, self.config.params_dtype)
        self.lora.a.sequence_parallel = self.sequence_parallel
        set_tensor_model_parallel_attributes(self.lora.b, True, 0, 1)

    def _adapter_output(self, hidden: Tensor) -> Tensor:
        """Map [s, b, in], with sequence parallelism [s / tp, b, in], to [s, b, out / tp]."""
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
    """Linear layer with an `Adapter`. Tensor-parallel ranks split the inputs."""

    def __init__(self, *args: object, lora: LoraConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert self.input_is_parallel
        assert not self.explicit_expert_comm
        shape = self.input_size_per_partition, self.output_size
        self.lora = Adapter(*shape, lora, self.config.params_dtype)
        self.lora.b.sequence_parallel = self.sequence_parallel
        set_tensor_model_parallel_attributes(self.lora.a, True, 1, 1)

    def _adapter_output(self, hidden: Tensor) -> Tensor:
        """Map [s, b, in / tp] to [s, b, out], with sequence parallelism to [s / tp, b, out]."""
        group = self.tp_group
        low = self.lora.down(hidden, first=group.rank() * hidden.shape[-1])
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=group)
        return self.lora.up(low)


class RoleAdapters:
    """Adapters of a megatron-core model. All other weights except a head are frozen.

    ``gpt``: this process's shard of the model, built with adapters. ``seed``: seed of the initial
    matrices A and of dropout.
    """

    def __init__(
        self,
        gpt: GPTModel,
        architecture: GPTArchitecture,
        parallel: ParallelState,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        self._gpt, self._architecture, self._parallel = gpt, architecture, parallel
        self.lora = lora
        self.dropout = TokenDropout(lora.adapter_dropout, seed) if lora.adapter_dropout else None
        gpt.adapter_dropout = self.dropout
        for name, parameter in canonical_parameters(gpt):
            parameter.requires_grad_(name.endswith((LORA_A, LORA_B)) or name in REWARD_HEAD)
        for name, adapter in _adapters(gpt, architecture).items():
            adapter.dropout, adapter.stream = self.dropout, _seed_of(seed, f"{name}.dropout")
        shapes = adapter_shapes(architecture, lora)
        self.fill(lambda name: initial_matrix(name, shapes[name], seed) if name in shapes else None)
        if gpt.pre_process and gpt.config.recompute_granularity == "full":
            gpt.embedding.register_forward_hook(_require_gradient)

    def begin_update(self, index: int) -> None:
        """Set the index of the optimizer update, which changes the dropout."""
        if self.dropout is not None:
            self.dropout.update = index

    def gather(self) -> dict[str, Tensor]:
        """Gather the trained weights on rank 0 (empty on other ranks). Call it on every rank."""
        trained = {
            name: parameter
            for name, parameter in canonical_parameters(self._gpt)
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
    def fill(self, full_tensor: Callable[[str], Tensor | None]) -> None:
        """Copy this process's shards. ``full_tensor``: name → tensor [out, in], or None."""
        tp_rank, tp_size = self._parallel.tp_rank, self._parallel.config.tensor
        for name, parameter in canonical_parameters(self._gpt):
            share = full_tensor(name) if parameter.requires_grad else None
            if share is None:
                continue
            if name not in REWARD_HEAD:
                share = split(name, share, self._architecture, tp_rank, tp_size)
            check_shape(name, share.shape, tuple(parameter.shape))
            parameter.copy_(share)


@contextlib.contextmanager
def adapters_off(gpt: nn.Module) -> Iterator[None]:
    """Turn the adapters off inside the block."""
    adapters = [module for module in gpt.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def _adapters(gpt: GPTModel, architecture: GPTArchitecture) -> dict[str, Adapter]:
    owners = {module.a: module for module in gpt.modules() if isinstance(module, Adapter)}
    return {
        name.removesuffix(LORA_A): owners[parameter]
        for name, parameter in canonical_parameters(gpt)
        if parameter in owners
    }


def _require_gradient(_: nn.Module, __: Any, embedded: Tensor) -> None:
    """Make the embeddings differentiable, because recomputation needs an input with gradient."""
    if torch.is_grad_enabled():
        embedded.requires_grad_()


def initial_matrix(name: str, shape: Shape, seed: int) -> Tensor:
    """Return an initial matrix. B is zero, A is uniform in ±1/√in by ``name`` and ``seed``."""
    tensor = torch.zeros(shape)
    if name.endswith(".a"):
        bound = 1.0 / math.sqrt(shape[-1])
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        tensor.uniform_(-bound, bound, generator=generator)
    return tensor


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
