"""Parameter shards of one process, as plain tensors.

Tensor-parallel ranks split a parameter along one dimension, or replicate it. Data-parallel ranks
then split each part by rows. Both splits are those of `torch.chunk`. The optimizer, copies and run
states use the local tensors and do not depend on DTensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.checkpoint.adapters import AdaptedWeight
from aligner.checkpoint.canonical import LazyTensors
from aligner.device import accelerator
from aligner.parallel.collectives import on_rank_zero
from aligner.parallel.groups import ParallelState

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterShard:
    """Shard of one parameter on this process. A part is what a tensor-parallel rank stores."""

    name: str
    shape: Shape  # of the full parameter
    split_dim: int | None  # split over tensor-parallel ranks, or None if replicated
    summed: bool  # sum gradients over tensor-parallel ranks
    dtype: torch.dtype  # of the forward pass. The local elements are float32.
    parameter: nn.Parameter  # a DTensor
    parallel: ParallelState

    @property
    def local(self) -> Tensor:
        """Elements of this process, possibly none, float32 [rows, ...]. Shares the memory."""
        return _local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of `local`, None before the first backward pass."""
        gradient = self.parameter.grad
        return None if gradient is None else _local(gradient)

    @property
    def part_shape(self) -> Shape:
        """Shape of this tensor-parallel rank's part, before data-parallel ranks split it."""
        shape = list(self.shape)
        if self.split_dim is not None:
            shape[self.split_dim] = len(self._part(self.split_dim))
        return tuple(shape)

    def _part(self, dim: int) -> range:
        return rows_of(self.shape[dim], self.parallel.tp_rank, self.parallel.config.tensor)

    @property
    def rows(self) -> range:
        """Row indices of `local` in this rank's part."""
        return rows_of(self.part_shape[0], self.parallel.dp_rank, self.parallel.dp_size)

    def share_of(self, tensor: Tensor) -> Tensor:
        """Return the view of a full parameter, float [out, in] or [out], that is this shard."""
        if self.split_dim is not None:
            part = self._part(self.split_dim)
            tensor = tensor.narrow(self.split_dim, part.start, len(part))
        return tensor[self.rows.start : self.rows.stop]

    def gather(self) -> Tensor:
        """Gather the full parameter in `dtype`. All processes must call this method."""
        parallel = self.parallel
        part = _gather(
            self.local.to(self.dtype), 0, self.part_shape[0], parallel.dp_group, parallel.dp_size
        )
        if self.split_dim is None:
            return part
        size = self.shape[self.split_dim]
        return _gather(part, self.split_dim, size, parallel.tp_group, parallel.config.tensor)


class GatheredParameters(LazyTensors):
    """Full parameters by name. To gather one, all processes must read it in the same order."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        adapted: Sequence[AdaptedWeight] = (),
        scale: float = 1.0,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Create the mapping. Adapters of the weights ``adapted`` are merged, times ``scale``.

        ``buffers``: additional tensors [...], equal on all processes.
        """
        self._shards = {shard.name: shard for shard in shards}
        self._buffers = buffers or {}
        self._adapted = {weight.parameter: weight for weight in adapted}
        self._scale = scale
        # The two matrices of each adapter are removed from the mapping.
        self._matrices = {
            weight.parameter: [self._shards.pop(f"{weight.adapter}.{leaf}") for leaf in "ab"]
            for weight in adapted
        }
        super().__init__([*self._shards, *self._buffers])

    def __getitem__(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name]
        tensor = self._shards[name].gather()
        if name not in self._adapted:
            return tensor
        a, b = (matrix.gather() for matrix in self._matrices[name])
        return self._adapted[name].merged(tensor, a, b, self._scale)


class SentWeights(LazyTensors):
    """Weights by name, broadcast by rank 0 when all processes read the same name."""

    def __init__(self, weights: Mapping[str, Tensor], parallel: ParallelState) -> None:
        """Broadcast names and shapes. Only rank 0 reads ``weights``, float [out, in] or [out]."""
        self._weights, self._parallel = weights, parallel
        self._shapes: dict[str, Shape] = on_rank_zero(
            lambda: {name: tuple(weights[name].shape) for name in weights}
        )
        super().__init__(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        if self._parallel.rank == 0:
            value = accelerator.to_device(self._weights[name].float())
        else:
            value = torch.empty(self._shapes[name], device=accelerator.device())
        if self._parallel.world_size > 1:
            dist.broadcast(value, 0)
        return value


def rows_of(total: int, rank: int, ranks: int) -> range:
    """Return the rows of one rank if `torch.chunk` splits ``total`` rows over ``ranks`` ranks."""
    chunk = -(-total // ranks)
    return range(min(rank * chunk, total), min((rank + 1) * chunk, total))


def _gather(part: Tensor, dim: int, total: int, group: dist.ProcessGroup, ranks: int) -> Tensor:
    if ranks == 1:
        return part
    part = part.movedim(dim, 0)
    chunk = -(-total // ranks)
    padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, chunk - part.shape[0])).contiguous()
    result = padded.new_empty(ranks * chunk, *part.shape[1:])
    dist.all_gather_into_tensor(result, padded, group=group)
    return result[:total].movedim(0, dim).contiguous()


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
