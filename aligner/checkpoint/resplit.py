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
