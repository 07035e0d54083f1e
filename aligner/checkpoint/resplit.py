"""Rows or columns of tensor-parallel parts that make up a part of another split."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import merge, split, split_axis


def origin_of_rows(
    name: str,
    shape: Sequence[int],
    count: int,
    architecture: GPTArchitecture,
    *,
    tp_rank: int,
    tp_size: int,
) -> Tensor:
    """Origin of each row (or column) of this rank's part, among ``count`` parts of ``shape``.

    ``name`` is that of a tensor which is split along an axis. Returns int64 ``[n]``: old part times
    its size along that axis, plus the place in it; -1: padding. The rules of `merge` and `split`
    are applied to the numbers of rows instead of rows.
    """
    axis = split_axis(name)
    assert axis is not None
    size = shape[axis]
    one = [size if dim == axis else 1 for dim in range(len(shape))]
    numbers = [torch.arange(1, size + 1).add(old * size).view(one) for old in range(count)]
    whole = merge(name, numbers, architecture)
    return split(name, whole, architecture, tp_rank, tp_size).reshape(-1) - 1


def runs_of_rows(origin: Tensor, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of adjacent rows: (first now, part, first in the part, how many).

    ``origin``: int64 [n], see `origin_of_rows`. ``size``: that of a part along the split axis.
    Padding belongs to no run.
    """
    part = torch.div(origin, size, rounding_mode="floor")
    together = (origin.diff() == 1) & (part.diff() == 0)
    edges = [0, *((~together).nonzero().view(-1) + 1).tolist(), len(origin)]
    for first, end in itertools.pairwise(edges):
        if first < end and (number := int(origin[first])) >= 0:
            yield first, number // size, number % size, end - first


def resplit(
    name: str, parts: list[Tensor], architecture: GPTArchitecture, *, tp_rank: int, tp_size: int
) -> Tensor:
    """`split` of what `merge` makes of ``parts``; of mapped parts only what is needed is read.

    Shapes of the parts: see `merge`. Returns a view of one part where the rows were together.
    """
    axis = split_axis(name)
    shapes = {part.shape for part in parts}
    if axis is None or len(shapes) > 1 or parts[0].dim() <= axis:
        return split(name, merge(name, parts, architecture), architecture, tp_rank, tp_size)
    shape = parts[0].shape
    origin = origin_of_rows(name, shape, len(parts), architecture, tp_rank=tp_rank, tp_size=tp_size)
    runs = list(runs_of_rows(origin, shape[axis]))
    if len(runs) == 1 and runs[0][3] == len(origin):
        _, part, start, length = runs[0]
        return parts[part].narrow(axis, start, length)
    wanted = [len(origin) if dim == axis else size for dim, size in enumerate(shape)]
    result = parts[0].new_zeros(wanted)
    for first, part, start, length in runs:
        result.narrow(axis, first, length).copy_(parts[part].narrow(axis, start, length))
    return result
