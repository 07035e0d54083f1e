"""One process's share of the parameters, as plain tensors.

A parameter is first split over tensor-parallel ranks along one dimension (or not at all), then over
data-parallel ranks by rows, both as `torch.chunk` splits. Elementwise code (optimizer, copies, run
state) uses the local tensors and does not depend on DTensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.checkpoint.adapters import AdaptedWeight
from aligner.device import accelerator
from aligner.parallel.collectives import on_rank_zero
from aligner.parallel.groups import ParallelState

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterShard:
    """This process's share of one parameter."""

    name: str
    shape: Shape  # of the full parameter
    split_dim: int | None  # split over tensor-parallel ranks, or None if replicated
    summed: bool  # sum gradients over tensor-parallel ranks
    dtype: torch.dtype  # of the forward pass. The local elements are float32.
    parameter: nn.Parameter  # a DTensor
    parallel: ParallelState

    @property
    def local(self) -> Tensor:
        """This process's elements (possibly 0), in the memory of the parameter."""
        return _local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of the local elements."""
        gradient = self.parameter.grad
        return None if gradient is None else _local(gradient)

    @property
    def part_shape(self) -> Shape:
        """Shape of this tensor-parallel rank's part, which its data-parallel ranks share."""
        shape = list(self.shape)
        if self.split_dim is not None:
            shape[self.split_dim] = len(self._part(self.split_dim))
        return tuple(shape)

    def _part(self, dim: int) -> range:
        return rows_of(self.shape[dim], self.parallel.tp_rank, self.parallel.config.tensor)

    @property
    def rows(self) -> range:
        """Rows of the part that contain the local elements."""
        return rows_of(self.part_shape[0], self.parallel.dp_rank, self.parallel.dp_size)

    def share_of(self, tensor: Tensor) -> Tensor:
        """Return a view of this process's elements of the full float tensor [out, in] or [out]."""
        if self.split_dim is not None:
            part = self._part(self.split_dim)
            tensor = tensor.narrow(self.split_dim, part.start, len(part))
        return tensor[self.rows.start : self.rows.stop]

    def gather(self) -> Tensor:
        """Gather the full parameter in the forward pass's dtype. All processes must call it."""
        parallel = self.parallel
        part = _gather(
            self.local.to(self.dtype), 0, self.part_shape[0], parallel.dp_group, parallel.dp_size
        )
        if self.split_dim is None:
            return part
        size = self.shape[self.split_dim]
        return _gather(part, self.split_dim, size, parallel.tp_group, parallel.config.tensor)


class GatheredParameters(Mapping[str, Tensor]):
    """Full parameters by name. All processes must index the same names in the same order."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        adapted: Sequence[AdaptedWeight] = (),
        scale: float = 1.0,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Prepare to gather. Adapters of the weights ``adapted`` are merged, with ``scale``.

        ``buffers``: tensors [...] that are in the mapping as they are.
        """
        self._shards = {shard.name: shard for shard in shards}
        self._buffers = buffers or {}
        self._adapted = {weight.parameter: weight for weight in adapted}
        self._scale = scale
        # Both matrices of each adapter, which have no names in the mapping.
        self._matrices = {
            weight.parameter: [self._shards.pop(f"{weight.adapter}.{leaf}") for leaf in "ab"]
            for weight in adapted
        }

    def __getitem__(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name]
        tensor = self._shards[name].gather()
        if name not in self._adapted:
            return tensor
        a, b = (matrix.gather() for matrix in self._matrices[name])
        return self._adapted[name].merged(tensor, a, b, self._scale)

    def __contains__(self, name: object) -> bool:
        return name in self._shards or name in self._buffers

    def __iter__(self) -> Iterator[str]:
        return chain(self._shards, self._buffers)

    def __len__(self) -> int:
        return len(self._shards) + len(self._buffers)


class SentWeights(Mapping[str, Tensor]):
    """Weights that rank 0 reads and sends. Index them as `GatheredParameters`."""

    def __init__(self, weights: Mapping[str, Tensor], parallel: ParallelState) -> None:
        """Send names and shapes. ``weights``: float [out, in] or [out], read on rank 0 only."""
        self._weights, self._parallel = weights, parallel
        self._shapes: dict[str, Shape] = on_rank_zero(
            lambda: {name: tuple(weights[name].shape) for name in weights}
        )

    def __getitem__(self, name: str) -> Tensor:
        if self._parallel.rank == 0:
            value = accelerator.to_device(self._weights[name].float())
        else:
            value = torch.empty(self._shapes[name], device=accelerator.device())
        if self._parallel.world_size > 1:
            dist.broadcast(value, 0)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # without sending the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def rows_of(total: int, rank: int, ranks: int) -> range:
    """Return the rows of chunk ``rank`` of ``ranks`` chunks."""
    chunk = -(-total // ranks)
    return range(min(rank * chunk, total), min((rank + 1) * chunk, total))


def _gather(part: Tensor, dim: int, total: int, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """Concatenate the chunks of all ranks along ``dim``, to length ``total``."""
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
