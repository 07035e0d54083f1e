"""One process's share of the parameters, as plain tensors.

A parameter is first split over tensor-parallel ranks along one dimension (or not at all), then
over data-parallel ranks by rows; both as `torch.chunk` splits. What is elementwise (optimizer,
copies, run state) works on the local tensors and knows nothing of DTensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.parallel.groups import ParallelState

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterShard:
    """Share of one parameter that this process holds."""

    name: str
    shape: Shape  # of the whole
    split_dim: int | None  # over tensor-parallel ranks; None: each has all of it
    summed: bool  # gradients are to be added up over tensor-parallel ranks
    dtype: torch.dtype  # of the forward pass; the local elements are float32
    parameter: nn.Parameter  # a DTensor
    parallel: ParallelState

    @property
    def local(self) -> Tensor:
        """This process's elements, in the memory of the parameter; maybe none."""
        return _local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of the local elements."""
        gradient = self.parameter.grad
        return None if gradient is None else _local(gradient)

    @property
    def part_shape(self) -> Shape:
        """Shape of the part that the data-parallel ranks of this tensor-parallel rank share."""
        if self.split_dim is None:
            return self.shape
        rows = rows_of(
            self.shape[self.split_dim], self.parallel.tp_rank, self.parallel.config.tensor
        )
        return tuple(
            len(rows) if dim == self.split_dim else size for dim, size in enumerate(self.shape)
        )

    @property
    def rows(self) -> range:
        """Rows of the part that the local elements are."""
        return rows_of(self.part_shape[0], self.parallel.dp_rank, self.parallel.dp_size)

    def share_of(self, whole: Tensor) -> Tensor:
        """View of this process's elements of ``whole``, a float tensor [out, in] or [out]."""
        part = whole
        if self.split_dim is not None:
            columns = rows_of(
                self.shape[self.split_dim], self.parallel.tp_rank, self.parallel.config.tensor
            )
            part = whole.narrow(self.split_dim, columns.start, len(columns))
        return part[self.rows.start : self.rows.stop]

    def gather(self) -> Tensor:
        """The whole parameter on every process, in the forward pass's dtype; collective."""
        parallel = self.parallel
        part = _gather(
            self.local.to(self.dtype), 0, self.part_shape[0], parallel.dp_group, parallel.dp_size
        )
        if self.split_dim is None:
            return part
        size = self.shape[self.split_dim]
        return _gather(part, self.split_dim, size, parallel.tp_group, parallel.config.tensor)


class WholeParameters(Mapping[str, Tensor]):
    """The whole parameters by name, each gathered when it is indexed.

    Collective: all processes index the same names in the same order.
    """

    def __init__(self, shards: Sequence[ParameterShard]) -> None:
        self._shards = {shard.name: shard for shard in shards}

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[name].gather()

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def rows_of(total: int, rank: int, ranks: int) -> range:
    """Rows of the ``rank``-th of ``ranks`` chunks."""
    chunk = -(-total // ranks)
    return range(min(rank * chunk, total), min((rank + 1) * chunk, total))


def _gather(part: Tensor, dim: int, total: int, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """Join the chunks of all ranks along ``dim``, which is ``total`` long then."""
    if ranks == 1:
        return part
    part = part.movedim(dim, 0)
    chunk = -(-total // ranks)
    padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, chunk - part.shape[0])).contiguous()
    whole = padded.new_empty(ranks * chunk, *part.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[:total].movedim(0, dim).contiguous()


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
