"""Columns of a batch: tensors ``[B, ...]`` or lists of B objects, taken, joined and gathered."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from aligner.distributed import accelerator
from aligner.errors import DataError


class _TensorKind(NamedTuple):
    """Description of a tensor that the other ranks need before it can be sent."""

    dtype: str
    shape: tuple[int, ...]


def take(column: Any, index: Tensor) -> Any:
    """The rows at ``index`` int64 [N], in that order."""
    if isinstance(column, Tensor):
        return column[index.to(column.device)]
    return [column[i] for i in index.tolist()]


def join(columns: Sequence[Any], pad_value: int | float) -> Any:
    """Rows one column after the other; tensors are right-padded in dimension 1 to the widest.

    A column without rows does not decide the width.
    """
    if not isinstance(columns[0], Tensor):
        return [item for column in columns for item in column]
    filled = [column for column in columns if len(column)] or columns[:1]
    if filled[0].ndim < 2:
        return torch.cat(list(filled))
    width = max(column.shape[1] for column in filled)
    return torch.cat([_pad(column, width, pad_value) for column in filled])


def gather(columns: Mapping[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """The columns of every rank of ``group``, in rank order, the same on every rank.

    Tensors arrive bit for bit on the device of this rank's own column, whatever their shapes
    elsewhere; each column must have one dtype. Every rank must call this.

    Raises:
        DataError: ranks hold different columns, or one column in different types; on every rank.
    """
    # Lists and shapes travel as objects, tensors as bytes.
    described = {
        key: _TensorKind(str(column.dtype), tuple(column.shape))
        if isinstance(column, Tensor)
        else column
        for key, column in columns.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, described, group=group)
    _check_same_columns(everyone)
    gathered: list[dict[str, Any]] = [{} for _ in everyone]
    for key in everyone[0]:
        if isinstance(columns[key], Tensor):
            shapes = [described[key].shape for described in everyone]
            parts: Sequence[Any] = _gather_tensors(columns[key], shapes, group)
        else:
            parts = [described[key] for described in everyone]
        for batch, part in zip(gathered, parts, strict=True):
            batch[key] = part
    return gathered


def _check_same_columns(everyone: Sequence[Mapping[str, Any]]) -> None:
    def kinds(described: Mapping[str, Any]) -> dict[str, str]:
        return {
            key: value.dtype if isinstance(value, _TensorKind) else "list"
            for key, value in described.items()
        }

    first = kinds(everyone[0])
    for rank, described in enumerate(everyone):
        if kinds(described) != first:
            raise DataError(
                f"rank {rank} of the group has columns {kinds(described)}, rank 0 has {first}; "
                "all ranks must bring the same columns"
            )


def _gather_tensors(
    mine: Tensor, shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup
) -> list[Tensor]:
    """One tensor per rank; every rank sends as many bytes as the largest has."""
    item = mine.element_size()
    sizes = [item * torch.Size(shape).numel() for shape in shapes]
    data = mine.detach().contiguous().flatten().view(torch.uint8).to(accelerator.device())
    sent = functional.pad(data, [0, max(sizes) - len(data)])
    received = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(received, sent, group=group)
    return [
        data[:size].clone().view(mine.dtype).reshape(shape).to(mine.device)
        for data, size, shape in zip(received, sizes, shapes, strict=True)
    ]


def _pad(column: Tensor, width: int, value: int | float) -> Tensor:
    """Right-pad dimension 1 of ``[B, S, ...]`` to ``width``."""
    if column.shape[1] == width:
        return column
    trailing = [0, 0] * (column.ndim - 2)
    return functional.pad(column, [*trailing, 0, width - column.shape[1]], value=value)
