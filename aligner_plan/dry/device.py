"""The dry device: fake tensors on ``cuda``, fake process groups, and counts of their operations.

What a real GPU computes is unknown here, except for what follows from values of the host (`known`).
A value that the host reads and that is unknown is 1.0, 1 or False: a finite loss, no end of a
sequence.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from aligner.device import accelerator
from aligner_plan.dry.driver import RememberedKernel, gpu_replacements
from aligner_plan.dry.files import file_calls
from aligner_plan.dry.graphs import Capturing
from aligner_plan.dry.known import KnownValues, Operation, tensors_in
from aligner_plan.dry.operations import Operations
from aligner_plan.dry.record import (
    Kind,
    Memory,
    Record,
    counted,
    is_kernel,
    kernel_of,
    running_place,
)
from aligner_plan.dry.replacements import Replacement, common_replacements
from aligner_plan.dry.streams import Order, Process

DeviceKind = Literal["gpu", "cpu"]
# Type of the tensors that are counted, and the allocator's granularity in bytes.
_MEMORY: dict[DeviceKind, tuple[str, int]] = {"gpu": ("cuda", 512), "cpu": ("cpu", 1)}
# Collectives for which gloo makes a tensor of the size of what is gathered or scattered, while they
# run: a copy that it reduces, or one that it gathers in. NCCL makes none.
_THROUGH_A_COPY = {
    "_allgather_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
}


class DryDevice(contextlib.AbstractContextManager["DryDevice"]):
    """One GPU among ``world_size``, in the place of process ``rank``.

    Enter it in a separate process, after `aligner_plan.dry.guard.load_guard` and before
    megatron-core is used. ``memory`` counts what is alive; `record` counts what a block does.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        *,
        memory_bytes: int = 80 << 30,
        kind: DeviceKind = "gpu",
    ) -> None:
        """``kind``: ``cpu`` is a process without a GPU, by the code that it runs."""
        self.kind = kind
        self.world_size = world_size
        self.rank = rank
        self.memory_bytes = memory_bytes
        self.memory = Memory(*_MEMORY[kind])
        self.records: list[Record] = []
        self._inside_kernel = False
        self._operations = Operations(self)
        self.capturing = Capturing()
        self.refuses_locks = self.pending_error = False
        self.order = Order()
        self._addresses = itertools.count(1 << 50, 1 << 40)  # of memory that was allocated again
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "DryDevice":
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with contextlib.ExitStack() as stack:
            for target, name, replacement in self._replacements():
                stack.enter_context(mock.patch.object(target, name, replacement))
            accelerator.has_gpu.cache_clear()
            stack.callback(accelerator.has_gpu.cache_clear)
            dist.init_process_group(
                "fake", store=FakeStore(), rank=self.rank, world_size=self.world_size
            )
            stack.callback(_destroy_groups)
            stack.enter_context(self.here())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def here(self, process: Process | None = None) -> Iterator[None]:
        """Work on the device in a thread that did not enter it; default of the first process."""
        with contextlib.ExitStack() as stack:
            if process is not None:
                stack.enter_context(self.order.of_process(process))
            stack.enter_context(self._mode)
            stack.enter_context(self._operations)
            yield

    @contextlib.contextmanager
    def record(self) -> Iterator[Record]:
        """Count what the block does; blocks may be nested."""
        record = Record(peaks={"": self.memory.snapshot()})
        self.records.append(record)
        try:
            yield record
        finally:
            self.records.remove(record)

    def holds(self, model: nn.Module) -> None:
        """Name the weights and gradient buffers of a model that is ready to train, or never will.

        Other kinds follow from the code that allocates.
        """
        for tensor in (*model.parameters(), *nn.Module.buffers(model)):
            gradients = [getattr(tensor, name, None) for name in ("main_grad", "grad")]
            self.memory.name(Kind.WEIGHTS, [_local(tensor.data)])
            there = (_local(each) for each in gradients if each is not None)
            self.memory.name(Kind.GRADIENTS, there)

    # Calls of operations (`aligner_plan.dry.operations`) ------------------------------------------

    def saw(self, operation: Operation) -> None:
        """Count an operation."""
        if self._inside_kernel:
            return
        on_device = [each for each in operation.results if self.memory.holds(each)]
        if self.pending_error and on_device and is_kernel(operation.func):
            self.pending_error = False
            raise RuntimeError("CUDA error: what an earlier call of the driver left behind")
        self._saw_memory(on_device)
        if self.capturing.graph is not None:
            self.capturing.graph.saw(operation)
            return
        if self.order.saw(operation):
            self.saw_host_wait()
        if self.records and (on_device or any(map(self.memory.holds, operation.operands))):
            self._count(counted(operation))

    def _saw_memory(self, tensors: Sequence[Tensor]) -> None:
        new = [tensor for tensor in tensors if self.memory.saw(tensor)]
        if new:
            self._saw_peak()

    def _saw_peak(self) -> None:
        if self.records:
            place = running_place()
            for record in self.records:
                record.saw_memory(self.memory, place)

    def one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that `torch.compile` would make one kernel of."""
        remembered = RememberedKernel(function, self._operations.known)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self._inside_kernel:
                return function(*args, **kwargs)
            self._inside_kernel = True
            try:
                out = remembered(*args, **kwargs)
            finally:
                self._inside_kernel = False
            operands, results = tensors_in((args, kwargs)), tensors_in(out)
            self._saw_memory(results)
            kernel = kernel_of(operands, results)
            self._count(lambda record: record.saw_kernel(kernel))
            return out

        return kernel

    def _seen(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function whose tensor no operation makes."""

        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            self._saw_memory([tensor])
            return tensor

        return made

    def _count(self, count: Callable[[Record], None]) -> None:
        """Now, or whenever the graph is replayed that is being captured."""
        if self.capturing.graph is not None:
            self.capturing.graph.counts(count)
            return
        for record in self.records:
            count(record)

    @property
    def runs(self) -> bool:
        """True if operations are run, not captured."""
        return self.capturing.graph is None

    @property
    def known(self) -> KnownValues:
        """Values of tensors."""
        return self._operations.known

    def saw_host_read(self, tensor: Tensor) -> None:
        """Count a read of a tensor's values (any shape); for those on the device the host waits."""
        if not tensor.is_cuda:
            self.order.on_host("a read of its values", [tensor])
            return
        self.capturing.refuse("the host waits for the device")
        self.order.launch("a read of its values", [tensor], [])
        self.order.host_waits(self.order.stream.moment())
        self.saw_host_wait()

    def saw_host_wait(self) -> None:
        """Count that the host waits until the device has nothing left to do."""
        place = running_place() if self.records else ""
        for record in self.records:
            record.host_waits[place] += 1

    def saw_copy_to_host(self, tensor: Tensor) -> None:
        """Count a copy of the whole storage of a tensor (any shape), for which the host waits."""
        self.saw_host_read(tensor)
        for record in self.records:
            record.copied_bytes += tensor.untyped_storage().nbytes()

    def saw_collective(
        self, packet: Any, operands: Sequence[Any], ranks: Sequence[int], is_async: bool = False
    ) -> None:
        """Count a collective, by its larger operand."""
        sizes = (sum(each.nbytes for each in tensors_in(operand)) for operand in operands)
        size = max(sizes, default=0)
        self.memory.wrote(tensors_in(operands[0]))
        name = packet.__name__
        if self.runs and self.kind == "gpu":
            reads, writes = tensors_in(operands[1:]), tensors_in(operands[0])
            if name.startswith("send"):
                reads, writes = writes, []
            self.order.launch(name, reads, writes)
        if self.kind == "cpu" and name in _THROUGH_A_COPY and len(ranks) > 1:
            with self.memory.beside(Kind.COMMUNICATION, size):
                self._saw_peak()
        overlaps = is_async or self.order.stream is not self.order.process.default
        self._count(lambda record: record.saw_collective(name, ranks, size, overlaps))

    def _replacements(self) -> Iterator[Replacement]:
        """Replacements of all calls of a driver, a process or a kernel that is not there."""
        if self.kind == "gpu":
            yield from gpu_replacements(self)
        else:  # made without an operation; a GPU's stands in host memory
            yield torch, "get_rng_state", self._seen(torch.get_rng_state)
        yield from file_calls(self, self._mode)
        yield from common_replacements(self._operations, self._resized)

    def _resized(self, storage: Any) -> None:
        storage._dry_address = next(self._addresses)
        self.memory.resized(storage)
        self.order.freed(storage)


def _local(tensor: Tensor) -> Tensor:
    """Local part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _destroy_groups() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
