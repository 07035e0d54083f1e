"""CUDA graphs on the dry device, which refuse operations that a graph cannot contain.

A captured operation is not run and not counted. A replay runs all captured operations and counts as
one launch. Memory allocated during a capture lives as long as the graph.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligner.errors import DryDeviceError
from aligner_plan.dry.files import address
from aligner_plan.dry.known import Operation
from aligner_plan.dry.record import Record, counted


class Graph:
    """Substitute for `torch.cuda.CUDAGraph`. A subclass sets ``device``, the `DryDevice`."""

    device: ClassVar[Any]

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._counts: list[Callable[[Record], None]] = []
        self._addresses: dict[int, tuple[Tensor, int]] = {}  # by storage, at the capture

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Capture all operations until `capture_end`."""
        self.device.graph = self
        self.device.captures += 1

    def capture_end(self) -> None:
        """Run operations again."""
        self.device.graph = None

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
            self.device.known.follow(operation)
            self.device.order.saw(operation)
        for record in self.device.records:
            launches = record.launches
            for count in self._counts:
                count(record)
            record.graphed += record.launches - launches - 1
