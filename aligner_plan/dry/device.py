"""The dry device: fake tensors on ``cuda``, fake process groups, and counts of their operations.

    operation ─► rules ─► fake tensor ─► known values ─► memory, streams ─► records or CUDA graph

Results of a GPU are unknown here, unless they are computable from values of the host (`known`). The
host reads an unknown value as 1.0, 1 or False: a finite loss, a sequence that does not end.
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
from aligner.errors import DryDeviceError
from aligner_plan.dry.driver import RememberedKernel, gpu_replacements
from aligner_plan.dry.files import file_calls
from aligner_plan.dry.graphs import Graph
from aligner_plan.dry.known import KnownValues, Operation, tensors_in
from aligner_plan.dry.operations import Operations
from aligner_plan.dry.record import (
    Kind,
    Memory,
    Record,
    counted,
    is_kernel,
    kernel_of,
    running_function,
)
from aligner_plan.dry.replacements import Replacement, common_replacements
from aligner_plan.dry.streams import Order, Process

DeviceKind = Literal["gpu", "cpu"]
# Type of the counted tensors, and granularity of the allocator in bytes.
_MEMORY: dict[DeviceKind, tuple[str, int]] = {"gpu": ("cuda", 512), "cpu": ("cpu", 1)}
# Collectives for which gloo temporarily allocates a tensor of the gathered or scattered size, to
# reduce or gather in it. NCCL does not.
_THROUGH_A_COPY = {
    "_allgather_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
}


class DryDevice(contextlib.AbstractContextManager["DryDevice"]):
    """One GPU among ``world_size``, used by process ``rank``.

    Enter it in a separate process, after `aligner_plan.dry.guard.load_guard` and before
    megatron-core is used. ``memory`` counts the bytes that are alive. `record` counts the
    operations of a block.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        *,
        memory_bytes: int = 80 << 30,
        kind: DeviceKind = "gpu",
    ) -> None:
        """``kind``: ``cpu`` is a process without a GPU, which runs the code for CPUs."""
        self.kind = kind
        self.world_size = world_size
        self.rank = rank
        self.memory_bytes = memory_bytes
        self.memory = Memory(*_MEMORY[kind])
        self.records: list[Record] = []
        self._inside_kernel = False
        self._operations = Operations(self)
        self.graph: Graph | None = None  # that is being captured
        self.captures = 0
        self.refuses_locks = self.pending_error = False
        self.order = Order()
        self._addresses = itertools.count(1 << 50, 1 << 40)  # of resized storages
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
            stack.enter_context(self.entered())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def entered(self, process: Process | None = None) -> Iterator[None]:
        """Use the device in another thread, by default in that of the first process."""
        with contextlib.ExitStack() as stack:
            if process is not None:
                stack.enter_context(self.order.of_process(process))
            stack.enter_context(self._mode)
            stack.enter_context(self._operations)
            yield

    @contextlib.contextmanager
    def record(self) -> Iterator[Record]:
        """Record the operations of the block. Blocks may be nested."""
        record = Record(peaks={"": self.memory.snapshot()})
        self.records.append(record)
        try:
            yield record
        finally:
            self.records.remove(record)

    def name_memory(self, model: nn.Module) -> None:
        """Set the kind of the weights and gradient buffers of a model that is ready for its phases.

        Other kinds follow from the code that allocates.
        """
        for tensor in (*model.parameters(), *nn.Module.buffers(model)):
            gradients = [getattr(tensor, name, None) for name in ("main_grad", "grad")]
            self.memory.name(Kind.WEIGHTS, [_local(tensor.data)])
            self.memory.name(
                Kind.GRADIENTS, (_local(gradient) for gradient in gradients if gradient is not None)
            )

    # Calls of operations (`aligner_plan.dry.operations`) ------------------------------------------

    def saw(self, operation: Operation) -> None:
        """Count an operation."""
        if self._inside_kernel:
            return
        on_device = [tensor for tensor in operation.results if self.memory.holds(tensor)]
        if self.pending_error and on_device and is_kernel(operation.func):
            self.pending_error = False
            raise RuntimeError("CUDA error: the error of an earlier call of the driver")
        self._saw_memory(on_device)
        if self.graph is not None:
            self.graph.saw(operation)
            return
        if self.order.saw(operation):
            self.saw_host_wait()
        if self.records and (on_device or any(map(self.memory.holds, operation.operands))):
            self._count(counted(operation))

    def _saw_memory(self, tensors: Sequence[Tensor]) -> None:
        is_new = [self.memory.saw(tensor) for tensor in tensors]
        if any(is_new):
            self._saw_peak()

    def _saw_peak(self) -> None:
        if self.records:
            location = running_function()
            for record in self.records:
                record.saw_memory(self.memory, location)

    def one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that `torch.compile` would turn into one kernel."""
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

    def _count(self, count: Callable[[Record], None]) -> None:
        """Count now, or at every replay of the graph that is being captured."""
        if self.graph is not None:
            self.graph.counts(count)
            return
        for record in self.records:
            count(record)

    @property
    def runs(self) -> bool:
        """True if operations are run, not captured."""
        return self.graph is None

    @property
    def known(self) -> KnownValues:
        """Values of tensors."""
        return self._operations.known

    def saw_host_read(self, tensor: Tensor) -> None:
        """Count a read of a tensor's values (any shape), which waits if it is on the device."""
        if not tensor.is_cuda:
            self.order.on_host("a read of its values", [tensor])
            return
        if self.graph is not None:
            raise DryDeviceError("the host waits for the device inside a CUDA graph")
        self.order.launch("a read of its values", [tensor], [])
        self.order.host_waits(self.order.stream.moment())
        self.saw_host_wait()

    def saw_host_wait(self) -> None:
        """Count a wait of the host until the device is idle."""
        location = running_function() if self.records else ""
        for record in self.records:
            record.host_waits[location] += 1

    def saw_copy_to_host(self, tensor: Tensor) -> None:
        """Count a copy of the storage of a tensor (any shape), for which the host waits."""
        self.saw_host_read(tensor)
        for record in self.records:
            record.copied_bytes += tensor.untyped_storage().nbytes()

    def saw_collective(
        self, packet: Any, operands: Sequence[Any], ranks: Sequence[int], is_async: bool = False
    ) -> None:
        """Count a collective by its larger operand. ``operands``: results first."""
        written = tensors_in(operands[0])
        sizes = (sum(t.nbytes for t in tensors_in(operand)) for operand in operands)
        size = max(sizes, default=0)
        self.memory.wrote(written)
        name = packet.__name__
        # Order among the streams.
        if self.runs and self.kind == "gpu":
            reads, writes = tensors_in(operands[1:]), written
            if name.startswith("send"):
                reads, writes = writes, []
            self.order.launch(name, reads, writes)
        # Temporary memory.
        if self.kind == "cpu" and name in _THROUGH_A_COPY and len(ranks) > 1:
            with self.memory.temporary(Kind.COMMUNICATION, size):
                self._saw_peak()
        overlaps = is_async or self.order.stream is not self.order.process.default
        self._count(lambda record: record.saw_collective(name, ranks, size, overlaps))

    def _replacements(self) -> Iterator[Replacement]:
        """Replace all calls that need a driver, another process or a kernel."""
        if self.kind == "gpu":
            yield from gpu_replacements(self)
        else:
            # This state is created without an operation. A GPU's is in host memory.
            real = torch.get_rng_state

            def get_rng_state() -> Tensor:
                state = real()
                self._saw_memory([state])
                return state

            yield torch, "get_rng_state", get_rng_state
        yield from file_calls(self, self._mode)
        yield from common_replacements(self._operations, self._resized)

    def _resized(self, storage: Any) -> None:
        storage._dry_address = next(self._addresses)
        self.memory.resized(storage)
        self.order.freed(storage)


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _destroy_groups() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
