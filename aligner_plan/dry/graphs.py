"""CUDA graphs on the dry device, which refuse operations that a graph cannot contain.

A captured operation is not run and not counted. A replay runs all captured operations and counts as
one launch. Memory allocated during a capture lives as long as the graph.
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
    """Substitute for `torch.cuda.CUDAGraph`."""

    def __init__(self, records: list[Record], values: KnownValues, order: Order) -> None:
        """``records``, ``values``, ``order``: attributes of the `DryDevice`."""
        self._records, self._known, self._order = records, values, order
        self._operations: list[Operation] = []
        self._counts: list[Callable[[Record], None]] = []
        self._addresses: dict[int, tuple[Tensor, int]] = {}  # by storage, at the capture

    def saw(self, operation: Operation) -> None:
        """Capture an operation.

        Raises:
            DryDeviceError: it copies between host and device, or draws random numbers.
        """
        func, args, _, _, operands, results = operation
        name, names = operation.name, (argument.name for argument in func._schema.arguments)
        draws = dict(zip(names, args, strict=False)).get("dropout_p", "attention" not in name)
        if torch.Tag.nondeterministic_seeded in func.tags and draws:
            raise DryDeviceError(f"{name} draws from a generator inside a CUDA graph")
        tensors = [*operands, *results]
        if len({tensor.device.type for tensor in tensors if tensor.dim()}) > 1:
            raise DryDeviceError(f"{func} copies between host and device inside a CUDA graph")
        self._operations.append(operation)
        for tensor in tensors:
            self._addresses[tensor.untyped_storage()._cdata] = tensor, address(tensor)
        if any(tensor.is_cuda for tensor in tensors):
            self.counts(counted(operation))

    def counts(self, count: Callable[[Record], None]) -> None:
        """Add ``count`` to the functions that a replay calls on a record."""
        self._counts.append(count)

    def replay(self) -> None:
        """Run all captured operations as one launch.

        Raises:
            DryDeviceError: memory of the operations has moved since the capture.
        """
        if any(address(tensor) != captured for tensor, captured in self._addresses.values()):
            raise DryDeviceError("a CUDA graph uses memory that was moved since it was captured")
        for operation in self._operations:
            self._known.follow(operation)
            self._order.saw(operation)
        for record in self._records:
            launches = record.launches
            for count in self._counts:
                count(record)
            record.graphed += record.launches - launches - 1


def graph_class(
    records: list[Record], values: KnownValues, order: Order, capturing: "Capturing"
) -> type[Graph]:
    """Create the class of graphs of a device. Libraries name it in annotations."""

    class CUDAGraph(Graph):
        def __init__(self) -> None:
            super().__init__(records, values, order)

        def capture_begin(self, pool: Any = None, **_: Any) -> None:
            capturing.graph = self
            capturing.count += 1

        def capture_end(self) -> None:
            capturing.graph = None

    return CUDAGraph


class Capturing:
    """The graph that is being captured, if any, and the number of captures."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.count = 0

    def refuse(self, action: str) -> None:
        """Raise `DryDeviceError` if a graph is being captured."""
        if self.graph is not None:
            raise DryDeviceError(f"{action} inside a CUDA graph")
