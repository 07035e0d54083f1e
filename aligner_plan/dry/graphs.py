"""CUDA graphs on the dry device: nothing is captured that a graph cannot hold.

A captured operation is not run and counts nothing. A replay runs all of them and is one launch.
What was allocated while capturing is alive as long as the graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aligner.errors import DryDeviceError
from aligner_plan.dry.files import address
from aligner_plan.dry.known import KnownValues, Operation
from aligner_plan.dry.record import Record, counted
from aligner_plan.dry.streams import Order


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self, records: list[Record], known: KnownValues, order: Order) -> None:
        """``records``: of the device's blocks. ``known``: its values. ``order``: of its streams."""
        self._records, self._known, self._order = records, known, order
        self._operations: list[Operation] = []
        self._counts: list[Callable[[Record], None]] = []
        self._places: dict[int, tuple[Tensor, int]] = {}  # of each storage, as it was captured

    def saw(self, operation: Operation) -> None:
        """Capture an operation.

        Raises:
            DryDeviceError: it copies between host and device, or draws random numbers.
        """
        func, args, _, _, operands, results = operation
        name, names = operation.name, (each.name for each in func._schema.arguments)
        drops = dict(zip(names, args, strict=False)).get("dropout_p", "attention" not in name)
        if torch.Tag.nondeterministic_seeded in func.tags and drops:
            raise DryDeviceError(f"{name} draws from a generator inside a CUDA graph")
        tensors = [*operands, *results]
        if len({each.device.type for each in tensors if each.dim()}) > 1:
            raise DryDeviceError(f"{func} copies between host and device inside a CUDA graph")
        self._operations.append(operation)
        self._places |= {each.untyped_storage()._cdata: (each, address(each)) for each in tensors}
        if any(each.is_cuda for each in tensors):
            self.counts(counted(operation))

    def counts(self, count: Callable[[Record], None]) -> None:
        """Add ``count`` to the calls that a replay makes on a record."""
        self._counts.append(count)

    def replay(self) -> None:
        """All captured operations, as one launch.

        Raises:
            DryDeviceError: memory that they use is elsewhere now.
        """
        if any(address(tensor) != place for tensor, place in self._places.values()):
            raise DryDeviceError("a CUDA graph uses memory that was moved since it was captured")
        for operation in self._operations:
            self._known.follow(operation)
            self._order.saw(operation)
        for record in self._records:
            before = record.launches
            for count in self._counts:
                count(record)
            record.graphed += record.launches - before - 1


def graph_class(
    records: list[Record], known: KnownValues, order: Order, capturing: "Capturing"
) -> type[Graph]:
    """The class of graphs of a device; a class, for libraries name it in annotations."""

    class CUDAGraph(Graph):
        def __init__(self) -> None:
            super().__init__(records, known, order)

        def capture_begin(self, pool: Any = None, **_: Any) -> None:
            capturing.graph = self
            capturing.count += 1

        def capture_end(self) -> None:
            capturing.graph = None

    return CUDAGraph


class Capturing:
    """State of the capture: the graph that is being captured, if any."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.count = 0  # captures so far

    def refuse(self, what: str) -> None:
        """Raise `DryDeviceError` while a graph is captured."""
        if self.graph is not None:
            raise DryDeviceError(f"{what} inside a CUDA graph")
