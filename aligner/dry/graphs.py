"""CUDA graphs on the dry device: nothing is captured that a graph cannot hold.

A captured operation is not run and counts nothing. A replay runs all of them and is one launch.
What was allocated while capturing is alive as long as the graph.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from aligner.dry.known import KnownValues, tensors_in
from aligner.dry.record import Record
from aligner.dry.streams import Order
from aligner.errors import DryDeviceError


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self, records: list[Record], known: KnownValues, order: Order) -> None:
        """``records``: of the device's blocks. ``known``: its values. ``order``: of its streams."""
        self._records, self._known, self._order = records, known, order
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._counts: list[Callable[[Record], None]] = []

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Capture an operation.

        Raises:
            DryDeviceError: it copies between host and device.
        """
        tensors = tensors_in((args, kwargs, out))
        if len({each.device.type for each in tensors if each.dim()}) > 1:
            raise DryDeviceError(f"{func} copies between host and device inside a CUDA graph")
        self._calls.append((func, args, kwargs, out))
        if any(each.is_cuda for each in tensors):
            self.counts(lambda record: record.saw(func, args, kwargs, out))

    def counts(self, count: Callable[[Record], None]) -> None:
        """Add ``count`` to the calls that a replay makes on a record."""
        self._counts.append(count)

    def replay(self) -> None:
        """All captured operations, as one launch."""
        for call in self._calls:
            self._known.follow(*call)
            self._order.saw(*call)
        for record in self._records:
            before = record.launches
            for count in self._counts:
                count(record)
            record.graphed += record.launches - before - 1


def graph_class(records: list[Record], known: KnownValues, order: Order) -> type[Graph]:
    """The class of graphs of a device; a class, for libraries name it in annotations."""

    class CUDAGraph(Graph):
        def __init__(self) -> None:
            super().__init__(records, known, order)

    return CUDAGraph


class Capturing:
    """State of the capture: the graph that is being captured, if any."""

    def __init__(self) -> None:
        self.graph: Graph | None = None

    @contextlib.contextmanager
    def into(self, graph: Graph, **_: Any) -> Iterator[None]:
        """Stand-in for `torch.cuda.graph`."""
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None

    def refuse(self, what: str) -> None:
        """Raise `DryDeviceError` while a graph is captured."""
        if self.graph is not None:
            raise DryDeviceError(f"{what} inside a CUDA graph")
