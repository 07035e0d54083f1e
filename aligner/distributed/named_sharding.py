"""`NamedSharding`: layout of workers, as an n-dimensional array of ranks with named axes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aligner.errors import LayoutError

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
MODEL_AXES = ["pipeline_parallel", "context_parallel", "tensor_parallel"]


class NamedSharding:
    """Array of worker ranks with named axes.

    ``NamedSharding(np.arange(8).reshape(2, 4), ["pipeline_parallel", "data_parallel"])`` means that
    worker 5 is pipeline stage 1 of data-parallel replica 1.
    """

    def __init__(self, layout: Sequence[Any] | NDArray[Any], names: Sequence[str]) -> None:
        array = np.asarray(layout)
        is_integer = array.dtype != object and np.issubdtype(array.dtype, np.integer)
        if not is_integer or len(np.unique(array)) != array.size:
            raise LayoutError(
                f"layout={layout!r} must be a rectangular array with each integer rank once"
            )
        if not array.ndim == len(names) == len(set(names)):
            raise LayoutError(
                f"layout has {array.ndim} axes. Their names must differ, got {list(names)}. Give "
                "one name per axis"
            )
        self._layout: NDArray[np.int64] = array.astype(np.int64)
        self._names = list(names)
        self.shape = dict(zip(self._names, self._layout.shape, strict=True))  # sizes by axis

    @property
    def layout(self) -> NDArray[np.int64]:
        """A copy of the array of ranks."""
        return self._layout.copy()

    @property
    def names(self) -> list[str]:
        """Names of the axes, outermost first."""
        return list(self._names)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of workers."""
        return int(self._layout.size)

    def get_axis_index(self, name: str) -> int:
        """Return the position of the axis ``name``."""
        if name not in self._names:
            raise LayoutError(f"unknown axis {name!r}. The axes are {self._names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the size of the axis ``name``."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return the coordinate of the rank ``worker_id`` on each axis, by axis name."""
        positions = np.argwhere(self._layout == worker_id)
        if not len(positions):
            raise LayoutError(f"rank {worker_id} is not in the layout {self._layout.tolist()}")
        return {name: int(i) for name, i in zip(self._names, positions[0], strict=True)}

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return all ranks at the given coordinates, outermost axis first."""
        return [int(rank) for rank in np.ravel(self._select(coords))]

    def get_ranks(self, **coords: int) -> "NamedSharding | int":
        """Return the ranks at ``coords``, over the remaining axes, or an int if no axis remains."""
        selected = self._select(coords)
        if selected.ndim == 0:
            return int(selected)
        return NamedSharding(selected, [name for name in self._names if name not in coords])

    def _select(self, coords: dict[str, int]) -> NDArray[np.int64]:
        index: list[int | slice] = [slice(None)] * self.ndim
        for name, coordinate in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= coordinate < size:
                raise LayoutError(f"coordinate {name}={coordinate} is outside 0..{size - 1}")
            index[self.get_axis_index(name)] = coordinate
        return np.asarray(self._layout[tuple(index)])

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, NamedSharding):
            return NotImplemented
        return self._names == value._names and np.array_equal(self._layout, value._layout)

    __hash__ = None  # type: ignore[assignment]  # the layout is an array

    def __repr__(self) -> str:
        return f"NamedSharding({self.shape}, layout={self._layout.tolist()})"


def layout_of(pipeline: int, data: int, context: int, tensor: int) -> NamedSharding:
    """Return ranks in megatron-core's order: tensor ranks are adjacent, pipeline is outermost."""
    ranks = np.arange(pipeline * data * context * tensor)
    return NamedSharding(ranks.reshape(pipeline, data, context, tensor), AXES)
